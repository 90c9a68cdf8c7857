"""The oldest nvidia-ml-py that is allowed gives what the newest gives, where it has the call at all."""

import msgspec
import pytest

CALLS = "clock calls 250\n"
SCENARIOS = {
    "busy": "driver 580.82.07\nthrottle_ids 269\ngpus 2\n"
    + CALLS
    + "gpu 0 util=97 reasons=36 temp=80 links=18 tx_kib=4\n",
    "lost": "gpus 2\n" + CALLS + "err 1 * code=15 at=700\n",
    "mig": "gpus 1\n" + CALLS + "mig gpu 0 instances=2 bytes=10737418240\n",
    "processes": "gpus 1\n" + CALLS + "gpu 0 procs=4001:1048576:C,4002:na:G\n",
    "consumer": "gpus 1\n" + CALLS + "gpu 0 ecc=none memtemp=none energy_mj=none mig=none\n",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_oldest_and_newest_agree(scenario, oldest_binding, name):
    """Samples are equal but for the thermal margin, which the old binding does not offer and says so."""
    newest = scenario(SCENARIOS[name], samples=5)
    oldest = scenario(SCENARIOS[name], samples=5, binding=oldest_binding)
    assert len(oldest.samples) == 5
    for new, old in zip(newest.samples, oldest.samples, strict=True):
        assert old.notes["thermal_margin_c"].endswith("this nvidia-ml-py does not offer it")
        notes = {column: why for column, why in old.notes.items() if column != "thermal_margin_c"}
        same = {"t": new.t, "cost_us": new.cost_us, "thermal_margin_c": new.thermal_margin_c, "notes": notes}
        assert msgspec.structs.replace(old, **same) == new
