"""Orbax on object stores: which library it comes to them by.

Orbax writes arrays by TensorStore and all else by etils, which takes TensorFlow's client for gs://
where TensorFlow is installed and gcsfs where it is not. All find the same credentials.
"""

import os

from tasks import files


def prepare(folder: str) -> None:
    """Looks whether the store of a remote `folder` lets us in, before Orbax does; it says it worse.

    Raises:
      UserError: see files.on_store.
    """
    files.list_names(folder)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        from etils.epath import gpath

        # etils asks Google by gRPC whether a bucket is zonal, which no emulator answers for it;
        # "yes" has it take gcsfs, since TensorFlow's client would go to Google past the emulator,
        # but through a proxy.
        proxied = bool(os.environ.get("HTTPS_PROXY"))
        gpath._is_zonal_gcs_bucket = lambda bucket: not proxied
