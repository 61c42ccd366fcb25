"""``flowtrain check MODEL``: whether a model of Hugging Face trains here as it does there."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flowtrain_lightning.cli.command_table import UsageError
from flowtrain_lightning.models import certificate_of, module_class, read_config
from flowtrain_lightning.models.published_config import usual_config

_NAME = "flowtrain check"


def run_for_model() -> None:
    """Print the certificate of a model, and end with 1 where it is refused, with 2 where nothing was proven.

    Raises:
        UsageError: there is no such model.
    """
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Compare a small twin of a model, trained in two halves from packed samples, with Hugging Face's "
        "whole model sample by sample: loss and every gradient, in float64. Ends with 1 where they differ, with 2 "
        "where nothing could be compared.",
    )
    parser.add_argument("model", help="folder or name of a model, or a model_type of transformers such as llava")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    options = parser.parse_args(sys.argv[2:])
    logging.getLogger("transformers").setLevel(logging.ERROR)  # what it says of a twin's numbers concerns nobody
    config = _config(options.model)
    found = certificate_of(config, module_class(config.model_type))
    print(json.dumps(found.as_data()) if options.json else found.sentence)
    if not found.trains:
        sys.exit(2 if found.is_unproven else 1)


def _config(model: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        if not Path(model).exists() and model in CONFIG_MAPPING:
            return usual_config(model)
        if "/" not in model and not Path(model).exists() and (near := get_close_matches(model, CONFIG_MAPPING, n=1)):
            raise UsageError(
                f"transformers has no model_type {model!r}, and {Path.cwd()} no such folder. Did you mean {near[0]!r}?"
            )
        return read_config(model)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{error}") from error
