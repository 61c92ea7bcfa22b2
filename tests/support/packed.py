"""Archives and compressed data, in memory."""

import io
import tarfile
import zipfile

import pyarrow as pa


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data).to_pybytes()


def tar(members, **header):
    """Returns a tar of members, {name: text or bytes} or a list of such pairs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **header) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            data = data.encode() if isinstance(data, str) else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()
