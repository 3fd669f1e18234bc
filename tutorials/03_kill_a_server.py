# %% [markdown]
# # 3. Kill a server while a text is written
#
# A small model writes a text. Its experts live in four servers, and each expert has three holders.
# Two servers end in the middle of a token, a third one hangs. The reader of the text sees no
# token change; the reader of this page sees what was noticed, and when.

# %%
import time
from pathlib import Path

import torch

import torch_eaas as eaas
from torch_eaas.models.checkpoint import Checkpoint
from torch_eaas.models.load import load_client, load_local
from torch_eaas.models.moe import read_experts, read_shape
from torch_eaas.testing import LocalCluster

torch.set_num_threads(1)
path = Path(eaas.__file__).parent / "assets" / "shakespeare"
with Checkpoint(path) as checkpoint:
    shape = read_shape(checkpoint)
    weights = {
        (layer, expert): read
        for layer in shape.moe_layers
        for expert, read in read_experts(
            checkpoint, layer, range(shape.num_experts), storage="fp32"
        )
    }

# %% [markdown]
# ## The cluster and its client
#
# Servers and client are threads of this process. With `torch-eaas launch` or `torch-eaas server`
# they are processes, and nothing else changes.

# %%
cluster = LocalCluster(weights, servers=4, copies=3)
client = cluster.client(top_k=shape.top_k)
model = load_client(path, client)

# %% [markdown]
# ## Accidents
#
# Each happens inside the forward pass of one token, just before a layer in the middle asks its
# experts: what the earlier layers asked is answered, what this layer asks is not.

# %%
PROMPT = b"ROMEO:\n"
TOKENS = 40
accidents = {10: "server-0 ends", 20: "server-1 hangs for a second", 30: "server-2 ends"}
middle = shape.moe_layers[len(shape.moe_layers) // 2]
token = 0


def before_the_middle(*_: object) -> None:
    """Let happen what is planned for this token."""
    if token == 10:
        cluster.kill(0)
    if token == 20:
        hang(cluster.servers[1], 1.0)
    if token == 30:
        cluster.kill(2)


def hang(server: eaas.ExpertServer, seconds: float) -> None:
    """Make a server's next batch take long; its answers come late, not never."""
    pool = server.experts
    run = pool.run

    def slow(*args: object, **options: object) -> torch.Tensor:
        pool.run = run
        time.sleep(seconds)
        return run(*args, **options)

    pool.run = slow


model.model.layers[middle].register_forward_pre_hook(before_the_middle)

# %% [markdown]
# ## The text
#
# Greedy decoding by hand, so that each token's time can be seen; a text this short needs no cache.

# %%
ids = torch.tensor([list(PROMPT)])
written, gaps, noticed = [], [], []
seen = client.counters()
with torch.no_grad():
    for token in range(TOKENS):
        started = time.monotonic()
        best = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
        written.append(int(best))
        gaps.append(1000 * (time.monotonic() - started))
        now = client.counters()
        new = {key: now.get(key, 0) - seen.get(key, 0) for key in ("resends", "hedges")}
        if token in accidents or any(new.values()):
            noticed.append((token, gaps[-1], accidents.get(token, ""), new))
        seen = now

print((PROMPT + bytes(written)).decode())
print(f"a token usually takes {sorted(gaps)[TOKENS // 2]:.0f} ms")
for at, gap, accident, new in noticed:
    print(f"token {at}: {gap:.0f} ms; {accident or 'somebody was late'}; the client counted {new}")

# %% [markdown]
# ## No token has changed
#
# The same text with all experts in this process. A request that was *resent* had lost its server;
# a *hedged* one went to a second holder as well, because the first was late.

# %%
local = load_local(path)
ids = torch.tensor([list(PROMPT)])
alone = local.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
assert alone[0, len(PROMPT) :].tolist() == written
counters = client.counters()
assert counters.get("resends", 0) + counters.get("hedges", 0) >= 1
# nobody waited for the server that hung: its experts have other holders
assert max(gaps[20:30]) < 1000
cluster.close()
