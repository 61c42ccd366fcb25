"""The command ``flowtrain export``: a checkpoint directory as a Lightning file, or as a folder of Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path

from flowtrain_lightning.cli.command_table import UsageError, command_parser

MISTAKES = ()


def run() -> None:
    """Write a checkpoint directory as one Lightning ``.ckpt`` file, or as a folder that ``transformers`` opens.

    Raises:
        UsageError: the directory is no checkpoint, or holds no model of Hugging Face where one is asked for, or the
            file exists or cannot be written.
    """
    parser = command_parser("export")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint directory that flowtrain wrote")
    parser.add_argument("out", type=Path, help="the file or, with hf, the folder to write; it must not exist")
    parser.add_argument(
        "--format",
        choices=("ckpt", "hf"),
        default="ckpt",
        help="ckpt: a file of Lightning, the default; hf: a folder of Hugging Face, its processor included",
    )
    parser.add_argument(
        "--weights_only",
        choices=("true", "false"),
        metavar="true|false",  # so that the usage is short
        default="true",
        help="false also reads objects that are no tensors or plain data, which may run code: only for what you trust",
    )
    options = parser.parse_args(sys.argv[2:])
    from flowtrain_lightning.checkpoint import export_checkpoint  # not for --help: it brings torch

    if options.out.exists():
        raise UsageError(f"{options.out} exists; choose another name.")
    weights_only = options.weights_only == "true"
    try:
        if options.format == "hf":
            _export_model(options.checkpoint, options.out, weights_only)
            print(f"Wrote {options.out}.")
        else:
            export_checkpoint(options.checkpoint, options.out, weights_only=weights_only)
            print(f"Wrote {options.out} ({options.out.stat().st_size / 2**20:.1f} MiB).")
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _export_model(source: Path, folder: Path, weights_only: bool) -> None:
    """Writes a folder of Hugging Face.

    Raises:
        ValueError: the checkpoint is not that of a model of Hugging Face.
    """
    from flowtrain_lightning.checkpoint import read_checkpoint
    from flowtrain_lightning.checkpoint.files import take_usual_mode
    from flowtrain_lightning.models import module_class

    checkpoint = read_checkpoint(source, weights_only=weights_only, optimizers=False)
    settings = dict(checkpoint.get("hyper_parameters", {}))
    if "model_type" not in (settings.get("model") or {}):
        raise ValueError(
            f"{source} does not say which model of Hugging Face it holds: it was not written by a HuggingFaceVLM. Load "
            "it by its own class, load_from_checkpoint, and save the part that is one."
        )
    module = module_class(settings["model"]["model_type"])(**settings)
    module.configure_model()
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(
            f"The weights in {source} are not those of a {type(module).__name__}, as of a class of your own that adds "
            "tokens or layers. Save the model by that class: YourClass.load_from_checkpoint(CHECKPOINT)"
            f".save_pretrained(FOLDER). ({str(error).splitlines()[1].strip()})"
        ) from error
    module.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        take_usual_mode(file)
