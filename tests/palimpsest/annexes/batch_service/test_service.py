"""Batches of a service are the batches that this process reads, whoever asks and whatever dies."""

import datetime
import hashlib
import json
import pickle
import threading
import time

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import palimpsest
from palimpsest.annexes.batch_service import client, gate
from palimpsest.annexes.batch_service.opening import Opened
from palimpsest.annexes.batch_service.tickets import TICKET_BYTES, Ticket, batch_of
from palimpsest.annexes.batch_service.tokens import Tokens
from tasks.terminal.command_line import UserError
from tests.palimpsest.annexes.batch_service.conftest import HOW, address
from tests.support.trees import assert_equal
from tests.trainer.conftest import built
from trainer import reading


@pytest.fixture
def remote(serve):
    return palimpsest.batches(address(serve()), **HOW)


def test_it_is_the_same_object(remote, local):
    assert remote.config == local.config
    assert remote.spec == local.spec
    assert len(remote) == len(local) == 1000
    for k in (0, 1, 2, 7, 3, 999):
        assert_equal(remote[k], local[k])
    assert_equal(remote[5:9], local[5:9])
    remote.state = 17
    for k, batch in zip(range(17, 30), remote, strict=False):
        assert_equal(batch, local[k])
    assert remote.explain(3, 2) == local.explain(3, 2)
    remote[0]["decoder_loss_weights"][:] = 0  # arrays are the caller's own


@pytest.mark.parametrize(
    "few", [{"task": "python_docs_lm"}, {"task": HOW["task"], "lengths": {"targets": 511}}]
)
def test_a_ticket_may_have_few_settings(serve, caches, few):
    """The server fills in our defaults, which a client in another language does not know."""
    here = palimpsest.batches(cache_dir=caches, **few)
    with flight.connect(address(serve())) as raw:
        content = json.dumps({"config": few, "first": 3}).encode()
        (record,) = (chunk.data for chunk in raw.do_get(flight.Ticket(content)))
        (told,) = raw.do_action(flight.Action("describe", content))
    assert_equal(batch_of(record), here[3])
    assert json.loads(told.body.to_pybytes())["config"] == here.config


def test_a_split_is_served(serve, caches):
    server = serve()
    remote = palimpsest.batches(address(server), split="validation", **HOW)
    local = palimpsest.batches(cache_dir=caches, split="validation", **HOW)
    assert remote.config == local.config
    assert remote.spec == local.spec
    assert len(remote) == len(local)
    for _ in range(2):  # each iteration begins with the first batch
        assert_equal([*remote], [*local])
    again = palimpsest.batches(address(server), config=json.loads(json.dumps(local.config)))
    assert_equal(again.shard(1, 2)[-1], local.shard(1, 2)[-1])
    assert remote.explain(0, 3) == local.explain(0, 3) != []
    with pytest.raises(UserError, match=r"has no (text in )?split test"):
        palimpsest.batches(address(server), split="test", **HOW)
    with pytest.raises(UserError, match="there is no batch"):
        client.Remote(address(server), local.config).batches()[len(local)]


def test_consecutive_batches_come_in_one_stream(serve, local):
    server = serve()
    for _, batch in zip(range(30), palimpsest.batches(address(server), **HOW), strict=False):
        assert batch
    asked = [json.loads(line)["call"] for line in server.log.getvalue().splitlines()]
    assert asked.count("do_get") <= 1  # the first batch; the stream after it is open


def test_a_stream_ends_with_its_token(serve, local, tmp_path):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=3)
    digest = hashlib.sha256(b"short").hexdigest()
    path = tmp_path / "tokens.toml"
    path.write_text(f'[one]\nsha256 = "{digest}"\nexpires = {soon.isoformat()}\n')
    server = serve(tokens=Tokens(str(path)))
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer short")])
    with flight.connect(address(server)) as raw:
        ticket = flight.Ticket(Ticket(local.config, 0, 1000).content())
        stream = raw.do_get(ticket, options)
        stream.read_chunk()
        time.sleep(3)
        with pytest.raises(flight.FlightUnauthenticatedError, match="has expired"):
            stream.read_all()


def test_a_call_opens_nothing_again(remote, local, monkeypatch):
    assert_equal(remote[3], local[3])
    monkeypatch.setattr(reading, "_reopened", None)
    assert_equal(remote[700], local[700])
    assert remote.shard(1, 2).spec == local.shard(1, 2).spec


def test_values_beyond_16_bits_are_sent_whole(serve, local, monkeypatch):
    """Earlier batches go in 16 bits; later ones come in 32, in another stream."""
    read, large = Opened.batch, {}

    def batch(self, step, index, parts):
        found = {name: array.copy() for name, array in read(self, step, index, parts).items()}
        if step in (2, 4):
            found["decoder_target_tokens"][0, 0] = (-1, 1 << 16)[step == 4]
        large[step] = found
        return found

    monkeypatch.setattr(Opened, "batch", batch)
    server = serve()
    made = iter(palimpsest.batches(address(server), **HOW))
    for step in range(6):
        assert_equal(next(made), large[step])
    made.close()
    assert server.log.getvalue().count('"do_get"') > 1


def test_a_ticket_loads_no_module(serve, local, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    config = local.config | {"task_module": str(tmp_path / "evil.py")}
    with flight.connect(address(serve())) as raw:
        content = json.dumps({"config": config, "first": 3}).encode()
        (record,) = (chunk.data for chunk in raw.do_get(flight.Ticket(content)))
    assert_equal(batch_of(record), local[3])
    assert not (tmp_path / "loaded").exists()


def test_parts_are_rows_of_the_batch(remote, local):
    for part in (remote.shard(1, 4), pickle.loads(pickle.dumps(remote.shard(1, 4)))):
        assert_equal(part[3], local.shard(1, 4)[3])
    with pytest.raises(UserError, match="not divisible by the 3 hosts"):
        remote.shard(0, 3)[0]


def test_clients_share_what_is_made(serve, local):
    server = serve()
    opened = [palimpsest.batches(address(server), **HOW) for _ in range(8)]
    found = {}

    def read(number):
        opened[number].state = 0
        found[number] = [batch for _, batch in zip(range(20), opened[number], strict=False)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = local[:20]
    for number in range(8):
        assert_equal(found[number], expected)
    assert len({id(each) for each, _ in server._opened._kept.values()}) == 1


def test_a_stream_goes_on_at_another_server(serve, local, monkeypatch):
    servers = [serve(), serve()]
    both = ",".join(address(each) for each in servers)
    remote = palimpsest.batches(both, **HOW)
    made = iter(remote)
    for k in range(40):
        if k in (7, 23):  # each server dies once, and the first comes back
            number = 0 if k == 7 else 1
            servers[number].stop(10)
            if number == 1:
                servers[0] = serve(port=servers[0].port)
        assert_equal(next(made), local[k])
    made.close()
    monkeypatch.setattr(client, "_PATIENCE_SECONDS", 0.1)
    for each in servers:
        each.stopping or each.stop(10)
    with pytest.raises(UserError, match="no batches from grpc://"):
        remote[500]


def test_a_server_with_another_cache_is_refused(serve, local):
    first = serve()
    law = client.Remote(address(first), {k: v for k, v in local.config.items() if k != "caches"})
    assert_equal(law.batches()[0], local[0])
    law._record = "0" * 32
    with pytest.raises(UserError, match="other examples"):
        law.batches()
    changed = law.config | {"caches": dict.fromkeys(law.config["caches"], "0" * 64)}
    with pytest.raises(UserError, match="another plan"):
        client.Remote(address(first), changed)


def test_a_cache_that_is_extended_has_new_batches(serve, text_cache, tmp_path):
    how = {"task": "python_docs_lm", "batch_size": 4, "lengths": {"targets": 32}}
    server = stale = expected = None
    for number in range(3):
        text = "".join(f"text {number} of {line} words\n" for line in range(30))
        (tmp_path / f"{number}.txt").write_text(text)
        built(
            *("--task=python_docs_lm", f"--corpus=text:{tmp_path}/*.txt", "--shard_bytes=4000"),
            *(f"--cache_dir={tmp_path}/caches", *["--extend"] * bool(number)),
            f"--vocabulary={text_cache.parents[1]}/vocabulary",
        )
        if number == 1:
            with pytest.raises(UserError, match="different plan"):
                stale[:60]
        if number == 2:  # its shards are open
            assert_equal(stale[:60], expected)
        server = server or serve(cache_dir=f"{tmp_path}/caches")
        here = palimpsest.batches(cache_dir=f"{tmp_path}/caches", **how)
        stale = palimpsest.batches(address(server), **how)
        if number:
            expected = here[:60]
            assert_equal(stale[:60], expected)


def ask(server, content, action=None):
    """Returns the error that a raw client gets."""
    with flight.connect(address(server)) as raw:

        def call():
            if action is None:
                return raw.do_get(flight.Ticket(content)).read_all()
            return list(raw.do_action(flight.Action(action, content)))

        with pytest.raises(pa.ArrowException) as caught:
            call()
    return caught.value


def hostile(config):
    """Yields (bytes of a ticket, what the refusal says)."""
    good = {"config": config, "first": 0}

    def changed(**values):
        return {**good, "config": {**config, **values}}

    yield b"", "not JSON"
    yield b"\xff\x00", "not JSON"
    yield b"[" * 60_000, "not JSON"
    yield b'{"first": NaN}', "not JSON"
    yield b"[]", "not a JSON object"
    yield b" " * (TICKET_BYTES + 1), "bytes, more than"
    yield {"first": 0}, "config must be"
    yield {**good, "config": []}, "config must be"
    yield {**good, "cache_dir": "/etc"}, "the ticket has"
    for first in (-1, 1.5, True, "0", None, 1 << 70, []):
        yield {**good, "first": first}, "first must be a whole number"
    yield {**good, "first": 1000}, "there is no batch 1,000"
    for count in (0, -1, 1 << 70, "2"):
        yield {**good, "count": count}, "count must be a whole number"
    for part in ([0], [1, 1], [0, 0], [-1, 2], "01", [0, 1 << 70], {}):
        yield {**good, "part": part}, "part must be"
    yield {**good, "part": [0, 3]}, "not divisible"
    yield {**good, "record": 5}, "record must be"
    yield {**good, "record": "0"}, "other examples"
    for name in ("cache_dir", "model_dir", "init_from", "on_event", "processes"):
        yield changed(**{name: "/etc"}), "no batches depend"
    yield changed(data={**config["data"], "local_dir": "/etc"}), "no batches depend"
    yield changed(data={**config["data"], "x" * 5000: 1}), "no batches depend"
    for task in ("../x_lm", "/etc/passwd", "a/b_lm", "seqio:x", "hf:x", "\0_lm", "a,../b_lm"):
        yield changed(task=task, caches={}), "is no name of a task"
    yield changed(task="x=1,y", caches={}), ""
    yield changed(task=""), "names no task"
    for short in ({"task": "../x_lm"}, {"task": "x_lm", "lengths": 5}, {"task": 5}):
        yield {"config": short, "first": 0}, ""
    for name, value in (
        ("seed", "x"), ("seed", 1 << 90), ("batch_size", None), ("batch_size", {}), ("task", 5),
        ("lengths", 5), ("lengths", {"inputs": "x"}), ("objective", [5]),
        ("objective", ["a=b"]), ("model", 5), ("model", {"family": "x"}), ("data", []),
        ("batch_schedule", 5), ("length_schedule", "x"), ("train_steps", -1), ("caches", 5),
        ("split", 5), ("split", "../x"), ("model", {**config["model"], "mlp_activations": [{}]}),
    ):  # fmt: skip
        yield changed(**{name: value}), ""
    yield changed(batch_size=10**12), "more than is served"
    yield changed(lengths={"inputs": 1 << 40, "targets": 8}), "more than is served"
    yield changed(batch_schedule="; ".join(f"{k}: 8" for k in range(1, 300))), "entries"
    yield changed(batch_schedule="5: 99999999"), "more than is served"


def test_hostile_tickets_are_refused_in_one_line(serve, local, capfd):
    server = serve()
    count = 0
    for content, says in hostile(local.config):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        error = ask(server, raw)
        told = error.extra_info.decode()
        assert says in told, (content, told)
        assert told, content
        assert "\n" not in told
        assert "Traceback" not in str(error)
        assert "the server failed" not in told, (content, told)
        count += 1
    assert capfd.readouterr().err == ""
    lines = [json.loads(line) for line in server.log.getvalue().splitlines()]
    assert [line["status"] for line in lines] == ["refused"] * count
    assert all(line["error"] for line in lines)
    assert server.gate.open == (0, 0)
    assert_equal(palimpsest.batches(address(server), **HOW)[0], local[0])


def test_nothing_else_is_answered(serve):
    server = serve()
    assert "no such action" in str(ask(server, b"", "shutdown"))
    with flight.connect(address(server)) as raw:
        descriptor = flight.FlightDescriptor.for_path("/etc/passwd")
        for call in (
            lambda: list(raw.list_flights()),
            lambda: raw.get_flight_info(descriptor),
            lambda: raw.get_schema(descriptor),
        ):
            with pytest.raises((pa.ArrowException, OSError), match="ListActions only") as found:
                call()
            assert "Traceback" not in str(found.value)
        assert [each.type for each in raw.list_actions()] == [
            "describe",
            "spec",
            "explain",
            "health",
        ]


def test_a_client_has_limits(serve, local, monkeypatch):
    ticket = Ticket(local.config, 0, 1 << 20).content()
    few = serve(limits=gate.Limits(streams=1, bytes=1 << 28, requests=1e6))
    with flight.connect(address(few)) as raw:
        first = raw.do_get(flight.Ticket(ticket))
        first.read_chunk()
        with pytest.raises(flight.FlightUnavailableError, match="1 streams of this client"):
            raw.do_get(flight.Ticket(ticket)).read_chunk()
        first.cancel()
    small = serve(limits=gate.Limits(64, bytes=1000, requests=1e6))
    assert b"bytes of the server's memory" in ask(small, ticket).extra_info
    slow = serve(limits=gate.Limits(64, 1 << 28, requests=2.0))
    with flight.connect(address(slow)) as raw:
        for _ in range(4):  # two seconds' worth
            list(raw.do_action("health"))
        with pytest.raises(flight.FlightUnavailableError, match="more than 2 requests a second"):
            list(raw.do_action("health"))
    # Our client waits until the server answers.
    assert_equal(palimpsest.batches(address(slow), **HOW)[0], local[0])


def test_an_unread_stream_costs_little(serve, local):
    server = serve(kept=0)
    with flight.connect(address(server)) as raw:
        stream = raw.do_get(flight.Ticket(Ticket(local.config, 0, 900).content()))
        stream.read_chunk()
        assert server.gate.open[0] == 1
        stream.cancel()
    for _ in range(100):
        if server.gate.open == (0, 0):
            break
        threading.Event().wait(0.05)
    assert server.gate.open == (0, 0)


def test_a_fault_of_the_server_is_told_without_its_traceback(serve, local, monkeypatch, capfd):
    server = serve()

    def broken(self, config):
        raise RuntimeError("a secret")

    monkeypatch.setattr(type(server._opener), "asked", broken)
    error = ask(server, Ticket(local.config, 0).content())
    assert "secret" not in str(error)
    assert "RuntimeError: a secret" in capfd.readouterr().err
