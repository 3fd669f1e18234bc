"""Train the small DeepSeek-V3 model that the repository carries, and write it as DeepSeek-R1 is.

Run it as ``python -m benchmarks.make_checkpoint --text FILE --out DIR``. The model reads and
writes bytes, so it needs no tokenizer: id 65 is ``A``. Its sizes are deliberately not all multiples
of 128: DeepSeek-R1's are not either, and a loader that takes them to be breaks on the real thing.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config

from benchmarks.export_checkpoint import load_checkpoint, write_checkpoint
from benchmarks.train_checkpoint import Corpus, TrainConfig, Trainer, evaluate, skews

DEFAULTS = TrainConfig()

# 2.7 million parameters; the names are those of DeepSeek-R1's config.json
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 144,
    "intermediate_size": 320,
    "moe_intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "initializer_range": 0.04,
    "bos_token_id": None,
    "eos_token_id": None,
}

README = """\
# A byte-level DeepSeek-V3

{millions:.2f} million parameters (without layer {mtp}) in the on-disk format of DeepSeek-R1: FP8 in
128 x 128 blocks, each expert's matrices apart, four shards with an index. Token ids are bytes, so
there is no tokenizer. It is here to show and to test serving, not to write well.

Trained from scratch with transformers' DeepseekV3ForCausalLM on the first nine tenths of
`{text}` (the copy that the repository carries: Tiny Shakespeare, in the public domain):

    python -m benchmarks.make_checkpoint \\
        --text {text} --out {out} --steps {train.steps} --seed {train.seed}

| | |
|---|---|
| steps | {train.steps} of {train.batch} x {train.length} bytes |
| router bias moved by {train.bias_step} | in the first {train.bias_steps} steps, {settled} |
| held-out loss before FP8 | {trained:.4f} nats a byte |
| held-out loss as stored here, in FP8 | {written:.4f} nats a byte |
| expert load there, largest (smallest) over mean, each MoE layer | {skews} |

- Layer {mtp}, for multi-token prediction, was **not trained**: its tensors hold initial values and
  copies of the embedding and the head. It is here for loaders.
- Keep prompt and answer together within {train.length} bytes or a few more, as in training: it
  does not extrapolate. In the repository's copy the loss is 1.6 up to byte 288 of a window and 3.9
  beyond byte 320, which is gibberish. Greedy text soon repeats itself; sampled text does not.
- The scales of `down_proj` lie in another shard than their weights, on purpose.
"""


def export(trainer: Trainer, folder: Path, text: str) -> None:
    """Write the folder, and a README that says what the written weights are worth.

    Args:
        trainer: A trainer that has finished; its model gets the weights as they were written.
        folder: Where to write.
        text: The name of the text, for the README.
    """
    held_out, length = trainer.corpus.held_out, trainer.config.length
    trained = evaluate(trainer.model, held_out, length)
    write_checkpoint(trainer.model, folder)
    load_checkpoint(folder, trainer.model)
    trainer.load.take()
    written = evaluate(trainer.model, held_out, length)
    words = README.format(
        millions=trainer.model.num_parameters() / 1e6,
        text=text,
        out=folder.name,
        train=trainer.config,
        settled=f"and in {trainer.config.settle_steps} after the last",
        trained=trained,
        written=written,
        skews=skews(trainer.load.take()),
        mtp=trainer.model.config.num_hidden_layers,
    )
    (folder / "README.md").write_text(words, encoding="ascii")
    print(f"wrote {folder}: held out {trained:.4f} as trained, {written:.4f} as written")


def main() -> None:
    """Train, export, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, required=True, help="the text to learn, any bytes")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--steps", type=int, default=DEFAULTS.steps, help="optimizer steps (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="seed (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--state", type=Path, help="a file to save to now and then, and to go on from if it exists"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = TrainConfig(steps=options.steps, seed=options.seed)
    trainer = Trainer(Corpus.read(options.text), config, DeepseekV3Config(**SIZES))
    if options.state is not None and options.state.exists():
        trainer.resume(options.state)
    trainer.run(options.state)
    export(trainer, options.out, options.text.name)


if __name__ == "__main__":
    main()
