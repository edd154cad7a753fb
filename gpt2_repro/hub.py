"""Check whether the Hub is reachable, and word its errors."""

import functools
import logging
import os
import sys

from gpt2_repro.errors import in_a_line


logger = logging.getLogger(__name__)

HUB_SECONDS = 4.0  # timeout of the check whether the Hub is reachable


@functools.cache
def check_hub() -> None:
    """Switch to offline mode if the Hub is not reachable. In offline mode, there is no check."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:  # without this check, the libraries of the Hub would retry for minutes
        httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        logger.warning("%s is not reachable (%s). Only the local cache is used.", constants.ENDPOINT, in_a_line(error))
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for `datasets`, if it is imported later, and for worker processes
        datasets = sys.modules.get("datasets")
        if datasets is not None:
            datasets.config.HF_HUB_OFFLINE = True


def hub_reason(error: Exception) -> str:
    """Return the reason why a request to the Hub failed, as one line of text."""
    from huggingface_hub import constants

    check_hub()
    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "the local cache has no copy, and the Hub is not reachable or HF_HUB_OFFLINE is set"
    return in_a_line(error)
