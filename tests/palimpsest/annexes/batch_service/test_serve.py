"""`palimpsest serve`: addresses, certificates and tokens, its pages, its end; clients in C++."""

import contextlib
import datetime
import hashlib
import json
import random
import re
import shutil
import signal
import ssl
import subprocess
import threading
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

import palimpsest
from palimpsest.annexes.batch_service import serve, shelves
from palimpsest.annexes.batch_service.tokens import Refused, Tokens
from tasks.terminal.command_line import UserError
from tests.palimpsest.annexes.batch_service.conftest import HOW
from tests.support import in_process, runs
from tests.support.processes import ROOT, wait_for
from tests.support.trees import assert_equal


@contextlib.contextmanager
def serving(caches, tmp_path, *flags, port=0):
    """Yields (the command's process, the lines that it prints), once it serves."""
    with (tmp_path / "out").open("w") as out:
        words = ("serve", f"--cache_dir={caches}", f"--port={port}", *flags)
        process = runs.start(runs.command("palimpsest", *words), stdout=out)
    printed = (tmp_path / "out").read_text
    try:
        assert wait_for(lambda: "serving" in printed(), process, 60), process.communicate()
        yield process, printed
    finally:
        process.kill()
        process.communicate()


def test_it_stops_in_order_also_if_nobody_reads_what_it_prints(caches, monkeypatch):
    def printed(line, **_):
        if line.startswith("stopping"):
            raise BrokenPipeError

    stopped, told = [], threading.Event()
    told.set()
    service = types.SimpleNamespace(port=1, stop=lambda seconds: stopped.append(seconds) or True)
    monkeypatch.setattr(serve, "_service", lambda *_: service)
    monkeypatch.setattr(serve, "_on_signals", lambda: told)
    monkeypatch.setattr("builtins.print", printed)
    with pytest.raises(BrokenPipeError):
        serve.run(serve.Flags(cache_dir=caches, port=0))
    assert stopped == [10]


@pytest.mark.processes
def test_a_command_serves_until_it_is_told_to_stop(caches, local, tmp_path):
    log = tmp_path / "access.jsonl"
    (tmp_path / "licenses.toml").write_text('"none" = "other"\n"python_*" = "PSF-2.0"\n')
    flags = ("--status_port=0", f"--access_log={log}", "--grace_seconds=1")
    flags += (f"--licenses={tmp_path}/licenses.toml",)
    with serving(caches, tmp_path, *flags) as (process, printed):
        address, status = re.search(r"(grpc://\S+); status: (\S+)", printed()).groups()
        remote = iter(palimpsest.batches(address, **HOW))
        assert_equal(next(remote), local[0])
        pages = {
            path: urllib.request.urlopen(status + path).read().decode()
            for path in ("/health", "/metrics", "/", "/caches.json")
        }
        assert pages["/health"] == "ok\n"
        assert 'calls_total{call="do_action",status="ok"}' in pages["/metrics"]
        assert "python_docs_span_corruption" in pages["/"]
        (cache,) = json.loads(pages["/caches.json"]).values()
        assert cache["splits"]["train"]["tokens"] > 10_000
        assert cache["license"] == "PSF-2.0"
        assert "PSF-2.0" in pages["/"]
        page = f"{status}/caches/python_docs_span_corruption"
        assert "software: " in urllib.request.urlopen(page).read().decode()
        windows = urllib.request.urlopen(f"{page}/windows?seed=2").read().decode()
        assert "windows of train, seed 2" in windows
        config = {name: json.dumps(value) for name, value in HOW.items() if name != "task"}
        asked = urllib.parse.urlencode({**config, "task": HOW["task"], "batch": 3, "row": 2})
        explained = urllib.request.urlopen(f"{status}/explain?{asked}").read().decode()
        for document in local.explain(3, 2):
            assert f"<td>{document.id}</td>" in explained
        assert urllib.request.urlopen(f"{page}/windows?seed={'9' * 5000}").status == 200
        wrong = "/explain?task=x", "/explain?batch=x&row=0", "/explain?row=9&" + asked[:-6]
        wrong += ("/explain?task=%22%5Cud800%22",)
        for path in ("/nothing", "/caches/..%2f..%2fetc", "/caches/x", *wrong):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(status + path)
        process.send_signal(signal.SIGTERM)
        # The stream, whose client takes no more, is cut off.
        assert process.wait(30) == 0
        remote.close()
        assert process.stderr.read() == ""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["status"] for line in lines} == {"ok"}
    assert {line["call"] for line in lines} >= {"do_action"}


def hashed(batches):
    """Returns one hash of all batches."""
    found = hashlib.sha256()
    for batch in batches:
        for name, array in batch.items():
            found.update(name.encode() + array.tobytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.processes
def test_a_thousand_batches_have_one_hash(caches, local, tmp_path):
    """Read here, by one client, by eight, and from two servers that are killed 20 times in turn."""
    wanted, ports, folders = hashed(local[:1000]), [], []
    for number in range(2):
        ports.append(runs.free_port())
        folders.append(tmp_path / str(number))
        folders[number].mkdir()
    address = "grpc://" + ",".join(f"127.0.0.1:{port}" for port in ports)
    draw, allowed = random.Random(0), [50]

    def paced():
        """Yields batches no further than the kills have come."""
        for k, batch in enumerate(palimpsest.batches(address, **HOW)):
            assert wait_for(lambda k=k: k < allowed[0], seconds=60)
            yield batch

    with ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as all_of_them:
        servers = [all_of_them.enter_context(contextlib.ExitStack()) for _ in ports]
        for server, port, folder in zip(servers, ports, folders, strict=True):
            server.enter_context(serving(caches, folder, port=port))
        assert hashed(palimpsest.batches(address, **HOW)) == wanted
        eight = [palimpsest.batches(address, **HOW) for _ in range(8)]
        assert [*pool.map(hashed, eight)] == [wanted] * 8
        reading = pool.submit(hashed, paced())
        for kill in range(20):
            time.sleep(draw.uniform(0, 0.3))
            servers[kill % 2].close()  # kills it
            allowed[0] += 50
            restarted = serving(caches, folders[kill % 2], port=ports[kill % 2])
            servers[kill % 2].enter_context(restarted)
        assert reading.result() == wanted


def certificate(folder):
    """Writes a certificate of localhost, and its key; returns their files."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [*command.split(), names, "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def token_file(folder, **holders):
    lines = []
    for name, (token, more) in holders.items():
        digest = hashlib.sha256(token.encode()).hexdigest()
        lines.append(f'[{name}]\nsha256 = "{digest}"\n{more}\n')
    path = folder / "tokens.toml"
    path.write_text("".join(lines))
    return path


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_tokens_and_certificates(caches, local, tmp_path, monkeypatch):
    pem, key = certificate(tmp_path)
    tokens = token_file(
        tmp_path,
        one=("first", ""),
        two=("second", 'tasks = ["other_*"]'),
        old=("third", "expires = 2020-01-01"),
    )
    flags = (
        f"--tls_certificate={pem}", f"--tls_key={key}", f"--tokens={tokens}",
        "--host=0.0.0.0", "--status_port=0",
    )  # fmt: skip
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(pem))
    with serving(caches, tmp_path, *flags) as (_, printed):
        port, status = re.search(r"grpc\+tls://\S+:(\d+); status: \S+:(\d+)", printed()).groups()

        def opened(token, scheme="grpc+tls"):
            monkeypatch.setenv("PALIMPSEST_TOKEN", token)
            return palimpsest.batches(f"{scheme}://localhost:{port}", **HOW)

        assert_equal(opened("first")[3], local[3])
        for token, says in (
            ("", "needs a token: set PALIMPSEST_TOKEN"),
            ("nobody's", "the token is unknown here"),
            ("second", "the token of two is not for task python_docs_span_corruption"),
            ("third", "the token of old has expired"),
        ):
            with pytest.raises(UserError, match=says):
                opened(token)
        trusting = ssl.create_default_context(cafile=str(pem))
        page = f"https://localhost:{status}"
        assert urllib.request.urlopen(f"{page}/health", context=trusting).read() == b"ok\n"
        for headers, found in (({}, "401"), ({"Authorization": "Bearer first"}, "")):
            asked = urllib.request.Request(f"{page}/metrics", headers=headers)
            with contextlib.ExitStack() as stack:
                if found:
                    stack.enter_context(pytest.raises(urllib.error.HTTPError, match=found))
                urllib.request.urlopen(asked, context=trusting)
    with pytest.raises(UserError, match=r"would show the token .*: use grpc\+tls"):
        palimpsest.batches("grpc://example.com:8815", **HOW)


def test_tokens_are_read_again(tmp_path, capsys):
    tokens = Tokens(str(token_file(tmp_path, one=("first", ""))))
    assert tokens.holder("Bearer first").name == "one"
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.3)
    token_file(tmp_path, two=("second", f"expires = {soon.isoformat()}"))
    holder = tokens.holder("bearer second")
    assert not holder.expired
    with pytest.raises(Refused):
        tokens.holder("Bearer first")
    time.sleep(0.4)
    assert holder.expired
    (tmp_path / "tokens.toml").write_text("nonsense")
    with pytest.raises(Refused, match="expired"):
        tokens.holder("Bearer second")
    assert "its former tokens stay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host=0.0.0.0"], "needs --tokens, --tls_certificate and --tls_key"),
        (["--host=0.0.0.0", "--tokens=x"], "needs --tokens, --tls_certificate and --tls_key"),
        (["--tls_key=x"], "belong together"),
        (["--tls_key=x", "--tls_certificate=y"], "no such file"),
        (["--tokens=x"], "x: no such file"),
        (["--port=70000"], "from 0 to 65535"),
        (["--local_dir=x"], "with a local --cache_dir"),
        (["--cache_dir=nowhere"], "holds no caches"),
        (["--task_module=nowhere"], "cannot be imported"),
    ],
)
def test_mistakes_are_one_line(caches, flags, says):
    given = [*flags, "--port=0"] if not any("port" in each for each in flags) else flags
    if not any(each.startswith("--cache_dir") for each in flags):
        given = [*given, f"--cache_dir={caches}"]
    made = in_process.run("palimpsest.annexes.batch_service.serve", *given)
    assert made.returncode == 2
    assert says in made.stderr
    assert made.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_refused(caches, serve):
    made = in_process.run(
        "palimpsest.annexes.batch_service.serve", f"--cache_dir={caches}", f"--port={serve().port}"
    )
    assert "address already in use; choose another" in made.stderr


def test_a_shelf_keeps_the_latest_within_its_bytes():
    made = []
    shelf = shelves.Shelf[bytes](len, most_bytes=10)
    for key in (1, 2, 1, 3, 1, 2):
        shelf.ask(key, lambda key=key: made.append(key) or b"12345")
    assert made == [1, 2, 3, 2]  # 2 was the one used longest ago when 3 came
    assert (shelf.bytes, len(shelf)) == (10, 2)
    shelf.ask(4, lambda: b"x" * 11)
    assert 4 not in shelf._kept
    begun, end = threading.Event(), threading.Event()

    def fail():
        begun.set()
        end.wait()
        raise ZeroDivisionError

    with ThreadPoolExecutor(2) as pool:  # what is made for one is what another waits for
        first = pool.submit(shelf.ask, 5, fail)
        begun.wait()
        coming, waits = shelf._coming[5], threading.Event()
        result = coming.result
        coming.result = lambda: waits.set() or result()
        second = pool.submit(shelf.ask, 5, lambda: b"")
        waits.wait()
        end.set()
        assert isinstance(first.exception(), ZeroDivisionError)
        assert second.exception() is first.exception()
    assert shelf.ask(5, lambda: b"") == b""
    held = {"a": [np.zeros(100), np.zeros(50)[:10]], "b": (np.zeros(3),)}
    assert shelves.array_bytes(held) == 8 * 153


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_client_in_c_plus_plus(serve, local, tmp_path):
    (library,) = pa.get_library_dirs()[:1]
    number = "".join(str(part) for part in pa.__version__.split(".")[:1]) + "00"
    subprocess.run(
        [
            "g++", "-std=c++20", f"-I{pa.get_include()}",
            ROOT / "examples" / "batch_service" / "client.cc", "-o", tmp_path / "client",
            f"{library}/libarrow_flight.so.{number}", f"{library}/libarrow.so.{number}",
            f"-Wl,-rpath,{library}",
        ],
        check=True,
    )  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(local.config))
    port = str(serve().port)
    made = subprocess.run(
        [tmp_path / "client", "127.0.0.1", port, config, "17", "2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for k in (17, 18):
        assert f'{{"batch": {k}}} 4 rows' in made.stdout
        for name, array in local[k].items():
            line = f"{name} {array.size} {array.sum()} {array.reshape(-1)[-1]}\n"
            assert line in made.stdout
    made = subprocess.run(
        [tmp_path / "client", "127.0.0.1", port, config, "-1", "2"], capture_output=True, text=True
    )
    assert made.returncode == 1
    assert made.stderr.startswith("first must be a whole number")
