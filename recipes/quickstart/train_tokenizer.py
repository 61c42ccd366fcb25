"""How `tokenizer.json` was made: a byte-level BPE of the training text.

python -m recipes.quickstart.train_tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flowtrain_lightning.data.records.conversation import ChatTemplate

RECIPE = Path(__file__).parent
VOCABULARY = 1024  # 256 bytes, the template's marks, and a token for each keyword and the commonest title words


def main() -> None:
    """Write the tokenizer beside this file."""
    template = ChatTemplate()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[
            "<|im_start|>",
            template.end,
            template.before_image,
            template.after_image,
            template.image_token,
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.save(str(RECIPE / "tokenizer.json"), pretty=False)
    print(f"{RECIPE / 'tokenizer.json'}: {tokenizer.get_vocab_size()} tokens")


def training_text() -> Iterator[str]:
    """Everything that is said in the training records, and the roles that say it."""
    with (RECIPE / "data" / "train.jsonl").open() as file:
        for line in file:
            for message in json.loads(line)["messages"]:
                yield f"{message['role']}\n{message['content'].replace('<image>', '')}"


if __name__ == "__main__":
    main()
