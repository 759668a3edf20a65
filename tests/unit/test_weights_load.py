"""Loading gives what safetensors gives, whatever the shards, the dtypes and the way of reading."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.held import held_of

pytestmark = pytest.mark.torch
RUN = ("float32", "bfloat16", "float16")


def _load(folder: Path, dtype: str = "float32", **how: object) -> tuple[dict, object]:  # type: ignore[type-arg]
    """Tensors and the report, in plain memory."""
    from services.weights.arena import HostArena
    from services.weights.folder import read_folder
    from services.weights.host import views
    from services.weights.layout import layout, run_dtype
    from services.weights.load import load

    found = read_folder(folder)
    plan = layout(found.facts, run_dtype(dtype))
    tensors = views(HostArena(plan.size), plan)
    return tensors, load(found, tensors, **how)  # type: ignore[arg-type]


def _assert_same(found: dict, folder: Path, dtype: str) -> None:  # type: ignore[type-arg]
    import torch
    from safetensors.torch import load_file

    wanted = {}
    for path in folder.glob("*.safetensors"):
        wanted |= load_file(path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
        assert found[name].dtype == kind
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor.to(kind)), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**30), shards=st.integers(1, 5), layers=st.integers(0, 12), run=st.sampled_from(RUN)
)
def test_equal_to_safetensors(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shards: int, layers: int, run: str
) -> None:
    from tests.weights_samples import random_tensors, save_sharded

    folder = tmp_path_factory.mktemp("model")
    save_sharded(folder, random_tensors(seed, layers), shards)
    found, _ = _load(folder, run)
    _assert_same(found, folder, run)


@pytest.mark.parametrize("way", ["direct", "mapped", "buffered"])
def test_every_way_gives_the_same(tmp_path: Path, way: str) -> None:
    from services.weights import sums
    from services.weights.sources import Way, ways
    from tests.weights_samples import random_tensors, save_sharded

    paths = save_sharded(tmp_path, random_tensors(3, width=90), 2)
    sums.write(tmp_path)
    if Way(way) not in ways(paths[0]):
        pytest.skip(f"this file system has no {way} reads")
    found, report = _load(tmp_path, way=Way(way))
    _assert_same(found, tmp_path, "float32")
    assert report.checked  # type: ignore[attr-defined]
    assert report.choice.way is Way(way)  # type: ignore[attr-defined]


def test_progress_reaches_the_total_and_never_goes_back(tmp_path: Path) -> None:
    from tests.weights_samples import random_tensors, save_sharded

    save_sharded(tmp_path, random_tensors(4), 2)
    seen: list[tuple[int, int]] = []
    _, report = _load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (report.nbytes, report.nbytes)  # type: ignore[attr-defined]
    assert len(seen) > 10


def test_the_log_says_how_far_it_is_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    from services.weights.meter import Meter

    class Ticking:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 0.4
            return self.now

    caplog.set_level(logging.INFO, "weir.weights")
    meter = Meter("m", 100 << 20, None, Ticking())  # type: ignore[arg-type]
    for _ in range(10):
        meter.add(10 << 20)
    # Every 0.4 s a read, every third is more than a second after the last line.
    told = [record.getMessage() for record in caplog.records if record.name == "weir.weights"]
    assert [line.split(",")[0] for line in told] == [
        "m: 30 of 100 MiB",
        "m: 60 of 100 MiB",
        "m: 90 of 100 MiB",
    ]


def test_the_way_is_chosen_by_what_was_measured(tmp_path: Path) -> None:
    """On a scripted clock by which mapped reads take ten times as long as direct ones."""
    from services.weights import sources
    from services.weights.folder import read_folder
    from services.weights.plan import plan, spans
    from services.weights.read import Choice, Figure, Reader, decide
    from services.weights.sources import Way
    from tests.weights_samples import random_tensors, save_sharded

    slow, fast = Figure(Way.MAPPED, 100, 10.0), Figure(Way.DIRECT, 100, 1.0)
    assert decide([slow, fast], 0.0).way is Way.DIRECT
    assert decide([fast, slow], 0.0).way is Way.DIRECT
    assert decide([], 1.0).way is Way.MAPPED
    assert decide([], 0.5).way is Way.BUFFERED
    assert str(Choice(Way.DIRECT, (fast,), 0.25)) == "direct (direct 0.00 GB/s, 25% in the page cache)"

    (path,) = save_sharded(tmp_path, random_tensors(5, layers=12), 1)
    folder = read_folder(tmp_path)
    reads = spans(plan(folder.facts))
    assert len(reads) > 32
    for _ in (reader := Reader(folder.paths, threads=2)).stream(reads, lambda span, view: None):
        pass
    assert reader.choice is not None
    if sources.cached([path]) > 0.9:
        assert reader.choice.way is Way.MAPPED
    elif reader.choice.figures:
        assert reader.choice.way in (Way.DIRECT, Way.MAPPED)


def test_what_is_not_in_the_page_cache_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.weights import sources
    from services.weights.folder import read_folder
    from services.weights.plan import plan, spans
    from services.weights.read import Reader
    from services.weights.sources import Way
    from tests.weights_samples import random_tensors, save_sharded

    (path,) = save_sharded(tmp_path, random_tensors(6, layers=12), 1)
    if not {Way.DIRECT, Way.MAPPED} <= set(sources.ways(path)):
        pytest.skip("this file system has one way only")
    monkeypatch.setattr(sources, "cached", lambda paths: 0.0)
    folder = read_folder(tmp_path)
    reads, seen = spans(plan(folder.facts)), []
    reader = Reader(folder.paths, threads=2)
    for span, view in reader.stream(reads, lambda span, view: None):
        assert bytes(view) == path.read_bytes()[span.start : span.stop]
        seen.append(span)
    assert sorted(seen, key=reads.index) == list(reads)
    assert reader.choice is not None
    assert [f.way for f in reader.choice.figures] == [Way.DIRECT, Way.MAPPED]
    assert reader.choice.way is max(reader.choice.figures, key=lambda f: f.rate).way
    assert sum(f.nbytes for f in reader.choice.figures) == sum(s.stop - s.start for s in reads[:3])


def test_a_consumer_that_stops_early_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    import threading

    from services.weights.folder import read_folder
    from services.weights.plan import plan, spans
    from services.weights.read import Reader
    from tests.weights_samples import random_tensors, save_sharded

    save_sharded(tmp_path, random_tensors(7), 2)
    folder = read_folder(tmp_path)
    before = held_of(tmp_path)
    stream = Reader(folder.paths).stream(spans(plan(folder.facts)), lambda span, view: None)
    next(stream)
    stream.close()
    assert held_of(tmp_path) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("weir-read")]
