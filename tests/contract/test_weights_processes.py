"""Several executors of one host on the same weights: one writes the parked file, the others map it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.real]
PROCESSES = 3
CODE = """
import json, sys
from pathlib import Path
from services.weights import open_weights
weights = open_weights(Path(sys.argv[1]))
weights.park()
parked = weights.resident_bytes()
weights.unpark()
total = float(sum(t.double().sum() for t in weights.tensors.values()))
found = {"source": weights.report.source, "parked": parked, "nbytes": weights.nbytes, "total": total}
print(json.dumps(found))
"""


def test_one_writes_the_others_map(tmp_path: Path) -> None:
    import torch

    from services.weights import sums
    from tests.weights_samples import random_tensors, save_sharded

    folder = tmp_path / "model"
    folder.mkdir()
    tensors = random_tensors(1, layers=4, width=900, dtypes=(torch.bfloat16,))
    save_sharded(folder, tensors, 2)
    sums.write(folder)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", CODE, str(folder)]
    children = [
        subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    try:
        outs = [child.communicate(timeout=280) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * PROCESSES, outs
    found = [json.loads(out) for out, _ in outs]
    assert sorted(f["source"] for f in found) == ["parked file"] * (PROCESSES - 1) + ["shards"]
    assert all(f["nbytes"] > 16 << 20 and f["parked"] <= 0.1 * f["nbytes"] for f in found)
    wanted = float(sum(t.float().double().sum() for t in tensors.values()))
    assert all(f["total"] == pytest.approx(wanted) for f in found)
    left = sorted(p.suffix for p in (tmp_path / "cache" / "weir" / "parked").iterdir())
    assert left == ["", ".sum", ".weights"]
