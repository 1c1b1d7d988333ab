"""The made-up records are true to the format: the record module itself accepts them."""

import json

from expertile.lab.race.record import Record
from tests.lab.report import samples


def test_every_sample_is_a_valid_record():
    for found in samples.lab(seed=5, workloads=5):
        assert Record.from_json(json.dumps(found)).to_json()
