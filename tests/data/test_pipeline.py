"""The training stream: order, skipping, slicing and exact resume, against hand-made values."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from evisrag_jax.data.pipeline import (
    DataError,
    ReadSettings,
    RecordStream,
    Rejected,
    epoch_order,
    fingerprint,
)
from evisrag_jax.data.schema import Record, write_records
from evisrag_jax.data.sources import read_records
from evisrag_jax.pages.decode import PageError, load_page
from evisrag_jax.prompts.chat import PromptTooLong

NO_THREADS = ReadSettings(threads=0)


def records(count, images=()):
    return [Record(f"r{i}", f"Q{i}?", tuple(images), ("1",), True) for i in range(count)]


def stream(count=7, prepare=lambda record: record.id, batch=2, **options):
    options = {"seed": 3, "read": NO_THREADS, **options}
    return RecordStream(records(count), prepare, batch, **options)


def ids(batches):
    return [[example.record.id for example in batch] for batch in batches]


def take(stream, count):
    return [next(stream) for _ in range(count)]


def test_every_epoch_is_a_fresh_permutation_from_the_seed():
    flat = [e for batch in take(stream(count=10, batch=5), 6) for e in batch]
    epochs = [[e.record.id for e in flat[i : i + 10]] for i in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(r.id for r in records(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [e.epoch for e in flat] == [0] * 10 + [1] * 10 + [2] * 10
    assert [e.position for e in flat] == list(range(30))
    assert [e.item for e in flat] == [e.record.id for e in flat]
    other = [e.record.id for batch in take(stream(count=10, batch=5, seed=4), 2) for e in batch]
    assert other != epochs[0]


def test_the_order_is_uniform_enough():
    """Each of 4 records stands first in a quarter of 2,000 epochs, within 5 standard deviations."""
    firsts = Counter(int(epoch_order(4, 11, epoch)[0]) for epoch in range(2000))
    assert all(abs(firsts[i] - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75) for i in range(4))


def test_shuffling_off_keeps_the_file_order_and_a_finite_stream_ends():
    batches = list(stream(count=5, epochs=1, shuffle=False))
    assert ids(batches) == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    assert ids(list(stream(count=2, epochs=2, shuffle=False))) == [["r0", "r1"], ["r0", "r1"]]


def test_threads_change_nothing():
    plain = ids(take(stream(), 12))
    for threads in (1, 2, 4):
        threaded = stream(read=ReadSettings(threads=threads, ahead=2 * threads))
        assert ids(take(threaded, 12)) == plain
        threaded.close()


def test_threads_prepare_the_next_batches_while_this_one_is_used():
    """After the first batch of 2, `ahead` = 5 more records are prepared without anybody asking."""
    done, enough = [], threading.Event()

    def prepare(record):
        done.append(record.id)
        if len(done) == 7:
            enough.set()
        return record.id

    line = stream(prepare=prepare, read=ReadSettings(threads=2, ahead=5))
    next(line)
    assert enough.wait(30)
    state = line.get_state()
    assert state["turn"] == 2 and not state["ahead"], "the place is that of what was used"
    line.close()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("done", [5, 7, 14])
def test_resume_gives_the_batches_that_came_next(threads, done):
    """B73: inside an epoch of 7 records, at an epoch's border (7 batches of 2), and later."""
    read = ReadSettings(threads=threads, ahead=8)
    straight = ids(take(stream(read=read), 20))
    first = stream(read=read)
    assert ids(take(first, done)) == straight[:done]
    state = json.loads(json.dumps(first.get_state()))
    take(first, 2)  # read past the checkpoint, as a killed run has
    for workers in (0, 3):
        again = stream(read=ReadSettings(threads=workers, ahead=4))
        again.set_state(state)
        assert ids(take(again, 20 - done)) == straight[done:]


def test_a_stream_can_be_set_back():
    a = stream(read=ReadSettings(threads=2, ahead=6))
    state = a.get_state()
    first = ids(take(a, 5))
    a.set_state(state)
    assert ids(take(a, 5)) == first


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("seed", {"seed": 4}),
        ("shuffle", {"shuffle": False}),
        ("lanes", {"lanes": 2}),
        ("fingerprint", {"count": 8}),
    ],
)
def test_resume_with_other_data_or_processes_is_refused(name, other):
    """B73: never silently another order."""
    with pytest.raises(DataError, match=f"cannot resume the data stream: {name} is"):
        stream(**other).set_state(stream().get_state())


def test_resume_may_change_the_batch():
    a = stream(batch=4)
    flat = [id for batch in ids(take(stream(batch=1), 12)) for id in batch]
    take(a, 2)
    b = stream(batch=1)
    b.set_state(a.get_state())
    assert [id for (id,) in ids(take(b, 4))] == flat[8:12]


def test_fingerprint_sees_content_and_order_but_not_the_folder():
    here = [Record("a", "q", ("/x/p.png",), ("1",), True), Record("b", "q", (), ("1",), True)]
    there = [Record("a", "q", ("/y/z/p.png",), ("1",), True), here[1]]
    changed = [Record("a", "q", ("/x/p.png",), ("2",), True), here[1]]
    assert fingerprint(here) == fingerprint(there)
    assert len({fingerprint(here), fingerprint(changed), fingerprint(here[::-1])}) == 3


def test_processes_share_one_line():
    """Position k of the line belongs to process k mod 3; together they read what one reads."""
    line = [e.record.id for batch in take(stream(batch=3), 10) for e in batch]
    shares = [take(stream(batch=1, process_index=i, process_count=3), 10) for i in range(3)]
    for i, share in enumerate(shares):
        assert [id for (id,) in ids(share)] == line[i::3]
        assert [e.position for (e,) in share] == list(range(i, 30, 3))


def processes(make, count):
    """The streams of `count` processes; their `get_state` must be called together, by `states`."""
    meeting, told = threading.Barrier(count), [None] * count

    def gather_of(i):
        def gather(tree):
            told[i] = tree
            meeting.wait(30)
            out = {name: np.stack([t[name] for t in told]) for name in tree}
            meeting.wait(30)
            return out

        return gather

    share = {"process_count": count}
    return [make(process_index=i, gather=gather_of(i), **share) for i in range(count)]


def states(streams):
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(lambda one: one.get_state(), streams))


def refusing(record):
    if record.id in ("r1", "r4"):
        raise PageError("x.png", "gone", "missing")
    return record.id


def lanes_of_four(count, **options):
    """Streams of `count` processes over four lanes, two of seven records refused."""

    def make(**share):
        return stream(prepare=refusing, batch=4 // count, lanes=4, **share, **options)

    return processes(make, count) if count > 1 else [make()]


@pytest.mark.filterwarnings("ignore:.*records were refused")
@pytest.mark.parametrize("count", [2, 4])
def test_lanes_give_the_same_batches_to_any_number_of_processes(count):
    """Rows of the global batch belong to lanes; a refused record is replaced within its lane. The counters
    and the place of all processes are those of one."""
    (one,) = lanes_of_four(1)
    expected = ids(take(one, 12))
    assert {id for batch in expected for id in batch} == {"r0", "r2", "r3", "r5", "r6"}
    many = lanes_of_four(count)
    shares = [ids(take(each, 12)) for each in many]
    assert [sum(rows, []) for rows in zip(*shares, strict=True)] == expected
    told = states(many)
    assert told == [one.get_state()] * count and told[0]["ahead"]
    assert all(each.metrics() == one.metrics() for each in many)


@pytest.mark.filterwarnings("ignore:.*records were refused")
@pytest.mark.parametrize(("before", "after", "threads"), [(1, 2, 0), (2, 1, 2), (4, 2, 2)])
def test_a_run_resumes_with_another_number_of_processes(before, after, threads):
    """B73: the same batches from there, also with threads that had read ahead."""
    expected = ids(take(*lanes_of_four(1), 12))
    first = lanes_of_four(before)
    for each in first:
        take(each, 5)
    state = json.loads(json.dumps(states(first)[0]))
    second = lanes_of_four(after, read=ReadSettings(threads=threads, ahead=8))
    for each in second:
        each.set_state(state)
    shares = [ids(take(each, 7)) for each in second]
    assert [sum(rows, []) for rows in zip(*shares, strict=True)] == expected[5:]


@pytest.mark.filterwarnings("ignore:.*records were refused")
def test_the_logs_of_all_processes_are_cut(tmp_path):
    """Process 0 cuts every file, so that another number of processes writes no row twice."""
    logs = [Rejected(tmp_path / name) for name in ("rejected.jsonl", "rejected-1.jsonl")]

    def make(process_index=0, **share):
        share |= {"process_index": process_index, "rejected": logs[process_index]}
        return stream(prepare=refusing, batch=2, lanes=4, **share)

    pair = processes(make, 2)
    for each in pair:
        take(each, 4)
    state = states(pair)[0]
    before = [log.path.read_text() for log in logs]
    for each in pair:
        take(each, 5)
    assert [log.path.read_text() for log in logs] != before
    stream(batch=4, lanes=4, rejected=logs[0]).set_state(state)
    assert [log.path.read_text() for log in logs] == before


# B12: skipping


def bad_set(tmp_path):
    """Eight records; r2 is a cut JPEG, r4 empty, r7 a web page. Returns records."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(8):
        path = tmp_path / f"{i}.jpg"
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
        paths.append(path)
    paths[2].write_bytes(paths[2].read_bytes()[: paths[2].stat().st_size // 2])
    paths[4].write_bytes(b"")
    paths[7].write_bytes(b"<html></html>")
    return [Record(f"r{i}", "Q?", (str(path),), ("1",), True) for i, path in enumerate(paths)]


def shape_of_page(record):
    return np.asarray(load_page(record.images[0])).shape


@pytest.mark.parametrize("threads", [0, 2])
def test_bad_files_are_skipped_whole_logged_and_counted(tmp_path, threads):
    """B12: eight records, three bad files, five delivered in full batches."""
    log = Rejected(tmp_path / "rejected.jsonl")
    read = ReadSettings(threads=threads, ahead=4)
    data = bad_set(tmp_path)
    line = RecordStream(data, shape_of_page, 5, seed=1, epochs=1, read=read, rejected=log)
    with pytest.warns(UserWarning, match=r"3 of 8 records were refused .*broken 1, empty 1, not_"):
        batches = list(line)
    (batch,) = batches
    assert sorted(e.record.id for e in batch) == ["r0", "r1", "r3", "r5", "r6"]
    assert {e.item for e in batch} == {(40, 60, 3)}
    rows = [json.loads(text) for text in log.path.read_text().splitlines()]
    assert {(r["id"], r["reason"]) for r in rows} == {
        ("r2", "broken"),
        ("r4", "empty"),
        ("r7", "not_image"),
    }
    assert all(r["path"] == data[int(r["id"][1])].images[0] and r["detail"] for r in rows)
    assert line.metrics() == {
        "data/seen": 8.0,
        "data/skipped": 3.0,
        "data/skipped_broken": 1.0,
        "data/skipped_empty": 1.0,
        "data/skipped_not_image": 1.0,
        "data/epoch": 1.0,
    }


@pytest.mark.filterwarnings("ignore:.*records were refused")
def test_skipping_resumes_exactly_and_the_log_is_cut(tmp_path):
    """B12 with B73: the same batches, the same counters, each skip written once."""

    def make(name):
        log = Rejected(tmp_path / name)
        read = ReadSettings(threads=2, ahead=6)
        return RecordStream(bad_set(tmp_path), shape_of_page, 2, seed=5, read=read, rejected=log)

    straight = make("a.jsonl")
    expected = ids(take(straight, 12))
    first = make("b.jsonl")
    first.rejected.path.write_text('{"stage": "validate", "row": 3}\n')
    take(first, 5)
    state = first.get_state()
    take(first, 4)
    with first.rejected.path.open("a") as file:
        file.write('{"stage": "stre')  # killed while writing
    second = make("b.jsonl")
    second.set_state(state)
    assert ids(take(second, 7)) == expected[5:]
    rows = (tmp_path / "b.jsonl").read_text().splitlines()
    assert rows[1:] == (tmp_path / "a.jsonl").read_text().splitlines()
    assert rows[0] == '{"stage": "validate", "row": 3}'
    assert second.metrics() == straight.metrics()


def test_too_long_prompts_are_skipped_too():
    def prepare(record):
        if record.id == "r1":
            raise PromptTooLong(record.id, 20, 10)
        return record.id

    line = stream(count=200, prepare=prepare, batch=199, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one in 200 is under one per cent: no warning
        (batch,) = list(line)
    assert len(batch) == 199 and line.skipped == {"too_long": 1}


def test_a_set_without_one_good_record_ends_instead_of_turning_for_ever():
    def prepare(record):
        raise PageError("x.png", "gone", "missing")

    with pytest.raises(DataError, match="the last 7 records were all refused"):
        next(stream(prepare=prepare))


@pytest.mark.parametrize("threads", [0, 2])
def test_other_exceptions_end_the_run_with_the_record_named(threads):
    def prepare(record):
        raise KeyError("bug")

    with pytest.raises(KeyError) as caught:
        next(stream(prepare=prepare, read=ReadSettings(threads=threads, ahead=2)))
    assert "while preparing record 'r" in caught.value.__notes__[0]


def test_wrong_settings_are_refused():
    with pytest.raises(DataError, match="no record"):
        RecordStream([], len, 1, seed=0)
    with pytest.raises(DataError, match="'r0'"):
        RecordStream(records(2) + records(1), len, 1, seed=0)
    for options in ({"batch": 0}, {"epochs": 0}, {"process_index": 2, "process_count": 2}):
        with pytest.raises(ValueError):
            stream(**options)
    for options in ({"lanes": 3, "process_count": 2}, {"lanes": 4, "batch": 6}):
        with pytest.raises(ValueError, match="lanes"):
            stream(**options)
    with pytest.raises(ValueError, match="epochs=None"):
        stream(epochs=1, process_count=2)
    with pytest.raises(ValueError, match="ahead"):
        ReadSettings(threads=4, ahead=2)


def test_a_killed_process_resumes_in_another(tmp_path):
    """B73: a process dies by os._exit while its threads read ahead; this one goes on."""
    data, state = tmp_path / "set.jsonl", tmp_path / "state.json"
    write_records(data, records(9))
    program = textwrap.dedent("""
        import json, os, sys
        from pathlib import Path
        from evisrag_jax.data.pipeline import ReadSettings, RecordStream
        from evisrag_jax.data.sources import read_records
        assert "jax" not in sys.modules
        read = ReadSettings(threads=2, ahead=8)
        stream = RecordStream(read_records(sys.argv[1]), lambda r: r.id, 2, seed=8, read=read)
        for _ in range(10):
            print(*(example.record.id for example in next(stream)), flush=True)
            Path(sys.argv[2]).write_text(json.dumps(stream.get_state()))
        next(stream)
        os._exit(9)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, str(data), str(state)]
    died = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert died.returncode == 9, died.stderr

    def make(threads):
        read = ReadSettings(threads=threads, ahead=8)
        return RecordStream(read_records(data), lambda r: r.id, 2, seed=8, read=read)

    straight = ids(take(make(0), 16))
    printed = [line.split() for line in died.stdout.splitlines()]
    assert printed == straight[:10]
    resumed = make(2)
    resumed.set_state(json.loads(state.read_text()))
    assert ids(take(resumed, 6)) == straight[10:]
