"""Whether the Hugging Face Hub answers. Its libraries would retry for minutes."""

import functools
import logging
import os
import sys

from gpt2_repro.errors import in_a_line


logger = logging.getLogger(__name__)

SECONDS = 4.0


@functools.cache
def check_hub() -> bool:
    """Return whether the Hub answers. If not, its libraries are put into offline mode and read their cache only."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        httpx.head(constants.ENDPOINT, timeout=SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        logger.warning("%s does not answer (%s). Only its cache is used.", constants.ENDPOINT, in_a_line(error))
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for `datasets`, if it is imported later, and for worker processes
        if datasets := sys.modules.get("datasets"):
            datasets.config.HF_HUB_OFFLINE = True
        return False
    return True


def hub_reason(error: Exception) -> str:
    """Return in a line why the Hub failed."""
    return in_a_line(error) if check_hub() else "it does not answer, and its cache does not have it"
