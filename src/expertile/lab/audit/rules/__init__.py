"""The rules of an audit: each a pure function from a Context to its findings."""
