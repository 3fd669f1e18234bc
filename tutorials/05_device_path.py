# %% [markdown]
# # 5. The device path
#
# On GPUs a model's step is one CUDA graph, and so is what a server does: kernels send, wait,
# compute and answer, the host only replays. What may change under them (who serves, who holds
# what, who is dead) lies in tables on the device. Here the same launches run on a CPU, as plain
# functions: this page shows what happens, and nothing of how fast.

# %%
from datetime import timedelta

import torch
from torch import nn

import torch_eaas as eaas
from torch_eaas.monitor.app import serve_in_background
from torch_eaas.testing import forbid_syncs, random_experts

torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_grad_enabled(False)
T, D, I, E, K, LAYERS, WORDS, LENGTH = 4, 32, 24, 8, 2, 3, 50, 12

# %% [markdown]
# ## Two servers
#
# An `ExpertSlab` has places for experts on a device; a `DeviceServer` runs those that are there,
# for clients whose requests have the form that it was captured for. Both hold all experts.

# %%
weights = random_experts(D, I, layers=list(range(LAYERS)), num_experts=E)
# a dead server costs a step one graph_wait: 20 ms by default, and longer here for a busy CPU
waits = {"graph_wait": timedelta(seconds=1), "request_timeout": timedelta(seconds=30)}
# in exact mode the bits do not depend on who answers
config = eaas.ClientConfig(hidden_size=D, top_k=K, max_tokens=T, combine="exact", **waits)
model = eaas.ModelInfo(fingerprint="", layers=tuple(range(LAYERS)), num_experts=E)
monitor = serve_in_background(eaas.MonitorConfig())
ends = {"transport": eaas.LoopbackTransport(), "monitor": monitor.url}


def serve(name: str, held: dict) -> eaas.DeviceServer:
    room = {"slots": len(weights), "max_layers": LAYERS, "max_experts": E}
    slab = eaas.ExpertSlab(D, I, **room, storage="fp32", device="cpu")
    slab.update(held)
    options = eaas.ServerConfig(name=name)
    server = eaas.DeviceServer(slab, eaas.PairSpec.of(config), options, model=model, **ends)
    return server.serve_in_background()


servers = [serve("s0", weights), serve("s1", weights)]
client = eaas.DeviceClient(config, **ends)
client.wait_ready(range(LAYERS), E)

# %% [markdown]
# ## A decoder
#
# A step may be run again as a whole, so it must be *repeatable*: it writes keys and values at the
# position that it was given, and advances nothing. Nor may it make the host wait for the device.


# %%
class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.register_buffer("kv", torch.zeros(2, T, LENGTH, D))
        self.register_buffer("positions", torch.arange(LENGTH)[None])
        remote = eaas.RemoteExperts(client, layer=number, num_experts=E, top_k=K)
        self.moe = eaas.RemoteMoE(eaas.SoftmaxTopKRouter(D, E, K), remote)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        self.kv.index_copy_(2, position, torch.stack([k, v]))
        seen = self.positions <= position
        x = x + nn.functional.scaled_dot_product_attention(q, *self.kv, attn_mask=seen)[:, 0]
        return torch.tanh(x + self.moe(x))


embed, head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
tokens, position = torch.zeros(T, dtype=torch.long), torch.zeros(1, dtype=torch.long)


def forward() -> torch.Tensor:
    x = embed(tokens)
    for layer in layers:
        x = layer(x, position)
    return head(x).argmax(-1)


# %% [markdown]
# ## The step
#
# `CapturedStep` runs the function once and captures it; `run` replays it until it has ended well.
# A call that waits for the device fails a capture, and `forbid_syncs` finds it on a CPU too.


# %%
def decode(step: eaas.CapturedStep, first: int = 0, end: int = LENGTH) -> list:
    written = []
    for at in range(first, end):
        if at == 0:
            tokens.copy_(torch.arange(T))
        position.fill_(at)
        # what advances does so after run(), which may have run the step several times
        tokens.copy_(step.run())
        written.append(tokens.tolist())
    return written


step = eaas.CapturedStep(client, forward)
eaas.check_repeatable(step, {f"layer {i}": layer.kv for i, layer in enumerate(layers)})
undisturbed = decode(step)
assert decode(eaas.CapturedStep(client, forbid_syncs()(forward))) == undisturbed

# %% [markdown]
# ## Servers die, and one is added
#
# Between two steps s0 ends, and s2 joins, which holds nothing yet. Within a step s1 ends as well:
# nobody holds an expert now, and the step waits until s2 is given them.


# %%
def within(*_: object) -> None:
    if position == 7 and not servers[2].experts.holdings:
        servers[1].close()
        servers[2].experts.update(weights)


layers[1].register_forward_pre_hook(within)
written = decode(step, end=3)
servers[0].close()
servers.append(serve("s2", {}))
written += decode(step, first=3)
assert written == undisturbed
print(f"{T} texts of {LENGTH} tokens are the same; the client counted {client.counters()}")
assert client.counters()["failed_steps"] >= 1
assert servers[2].counters()["requests"] > 0

# %% [markdown]
# ## On a GPU
#
# Nothing of this has run on a GPU yet. There it is `device="cuda"` for slab and client, and
# `transport="auto"`, which is CUDA IPC on one host. Servers are processes, `torch-eaas server DIR
# --device cuda`, and die as such: a graph runs no Python within. The next `run` overwrites outputs.

# %%
for each in (client, *servers, monitor):
    each.close()
