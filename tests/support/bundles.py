"""Files of a bundle."""

import io
import tarfile
from pathlib import Path

import zstandard


def members(bundle: Path) -> dict[str, bytes]:
    with zstandard.open(bundle, "rb") as stream, tarfile.open(fileobj=io.BytesIO(stream.read())) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
