"""The arguments of scripts/download.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from search_r1.data.hub.artifacts import ARTIFACTS, Artifact, artifacts
from search_r1.data.hub.download import Downloader
from search_r1.data.hub.listing import HubUnavailable
from verl.errors import VerlError


def main(description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Download what the arguments name. Returns the exit status: 0, or 1 if errors were printed.

    A missing artifact does not stop the others.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--save_path", type=Path, required=True, help="folder for all downloads")
    add("--what", default="corpus,e5", help=f"what to download: any of {','.join(ARTIFACTS)} (default: %(default)s)")
    add("--repo_id", help="dataset repository of the flat e5 index, if not Search-R1's")
    add(
        "--remove_parts",
        action="store_true",
        help="delete the downloaded parts once the file made from them is complete",
    )
    args = parser.parse_args(arguments)
    try:
        chosen, downloader = artifacts(args.what, args.repo_id), Downloader(args.save_path, args.remove_parts)
        missing: list[VerlError] = [error for one in chosen if (error := _get(downloader, one)) is not None]
    except VerlError as error:
        missing = [error]
    for found in missing:
        print(f"error: {found}", file=sys.stderr)
    return 1 if missing else 0


def _get(downloader: Downloader, artifact: Artifact) -> HubUnavailable | None:
    try:
        downloader.get(artifact)
    except HubUnavailable as error:
        return error
    return None
