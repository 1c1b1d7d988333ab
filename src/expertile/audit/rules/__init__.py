"""Each module holds rules of one kind: functions of a report that yield findings."""
