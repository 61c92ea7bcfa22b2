"""Checks a Dockerfile without Docker, in a clean environment on this machine.

    python docker/check.py pipeline
    python docker/check.py trainer

Executes every COPY and every `RUN pip` in a temporary folder that represents the image's root, with
a new virtual environment as its Python; then starts the image's commands there. Does not check
users, base images and Beam's boot program, which need Docker. Needs network access and takes some
minutes.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).parents[1]
# Commands that must succeed in each image, and packages that must not be in it.
COMMANDS = {
    "pipeline": (("-c", "import apache_beam, gcsfs, pipeline.building.graph"),
                 ("-m", "pipeline.build", "--help")),
    "trainer": (("-c", "import gcsfs, libtpu, matplotlib, trainer.loop"),
                *(("-m", f"trainer.{name}", "--help")
                  for name in ("pretrain", "plan", "evaluate", "report", "explain", "export"))),
}  # fmt: skip
ABSENT = {
    "pipeline": ("jax", "tensorflow", "torch"),
    "trainer": ("apache_beam", "tensorflow", "sentencepiece", "torch"),
}


def instructions(path: pathlib.Path) -> list[tuple[str, str]]:
    """Returns each instruction as (keyword, arguments), with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def check(image: str, folder: pathlib.Path) -> None:
    """Builds `image` in `folder` and runs its commands.

    Raises:
      CalledProcessError: a step fails.
      AssertionError: the image contains a package of ABSENT.
    """
    workdir, arguments, stages, name = pathlib.Path("/"), {}, {}, ""
    for word, rest in instructions(ROOT / "docker" / f"Dockerfile.{image}"):
        if word == "FROM":
            name = rest.partition(" AS ")[2] or "final"
            stages[name] = folder / name
            if rest.startswith("python:"):
                venv.create(stages[name] / "usr/local", with_pip=True)
        elif word == "ARG":
            arguments.update([rest.split("=")])
        elif word == "WORKDIR":
            workdir = pathlib.Path(rest)
        elif word == "COPY" and "--from=beam" not in rest:
            *sources, target = rest.split()
            origin = ROOT
            if sources[0].startswith("--from="):
                origin = stages[sources.pop(0).partition("=")[2]]
            to = stages[name] / str(workdir / target).lstrip("/")
            for source in sources:
                copy(origin / source.lstrip("/"), to)
        elif word == "RUN" and rest.startswith("pip "):
            command = rest.replace("/install", str(stages[name] / "install"))
            for key, value in arguments.items():
                command = command.replace(f"${{{key}}}", value)
            python = stages[name] / "usr/local/bin/python"
            here = stages[name] / str(workdir).lstrip("/")
            subprocess.run([python, "-m", *shlex.split(command)], cwd=here, check=True)
    root = stages["final"]
    (packages,) = root.glob("usr/local/lib/python3*/site-packages")
    for command in COMMANDS[image]:
        python = root / "usr/local/bin/python"
        subprocess.run([python, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for each in ABSENT[image]:
        assert not (packages / each).exists(), f"the image {image} contains {each}"
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    count = len(list(packages.glob("*.dist-info")))
    print(f"{image}: {count} packages, {size / 1e6:,.0f} MB on top of the base image")


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies as COPY does: the contents of a folder, or a file, into the folder `target`."""
    ignored = shutil.ignore_patterns("__pycache__")
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True, ignore=ignored)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


if __name__ == "__main__":
    if sys.argv[1:] not in (["pipeline"], ["trainer"]):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        check(sys.argv[1], pathlib.Path(temporary))
