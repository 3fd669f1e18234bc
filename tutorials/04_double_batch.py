# %% [markdown]
# # 4. Two batches in flight
#
# While a batch is at the experts, its client has nothing to do, unless it has another batch: then
# it computes that one's attention. `DoubleBatchOverlap` splits a batch into micro-batches and does
# this for any model code, without a change to it. The last part does it by hand, without threads.

# %%
import re
import time
from datetime import timedelta

import torch
from torch import nn

import torch_eaas as eaas
from torch_eaas.testing import DelayedExperts, random_experts

torch.set_num_threads(1)
D, E, K, LAYERS, ROWS, STEPS = 512, 8, 2, 3, 128, 4

# %% [markdown]
# ## A decoder and its experts
#
# The experts take 3 ms longer than they compute, as if they were far away. A layer is attention
# over its own KV cache, then `RemoteMoE`. Nothing in it knows of micro-batches.

# %%
pool = eaas.ExpertPool(D, 32)
pool.update(random_experts(D, 32, layers=list(range(LAYERS)), num_experts=E))
transport = eaas.LoopbackTransport()
slow = DelayedExperts(D, pool.holdings, timedelta(milliseconds=3), pool=pool)
server = eaas.ExpertServer(slow, transport=transport).serve_in_background()
config = eaas.ClientConfig(hidden_size=D, top_k=K, combine="exact")
client = eaas.Client(config, servers=[server.address], transport=transport)
client.wait_ready(range(LAYERS), E)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        remote = eaas.RemoteExperts(client, layer=number, num_experts=E, top_k=K)
        self.moe = eaas.RemoteMoE(eaas.SoftmaxTopKRouter(D, E, K), remote)

    def attend(self, x: torch.Tensor, cache: dict) -> torch.Tensor:
        q, k, v = self.qkv(x[:, None]).chunk(3, dim=-1)
        if self in cache:
            k, v = (torch.cat(pair, dim=1) for pair in zip(cache[self], (k, v), strict=True))
        cache[self] = (k, v)
        return x + nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

    def forward(self, x: torch.Tensor, cache: dict) -> torch.Tensor:
        x = self.attend(x, cache)
        return torch.tanh(x + self.moe(x))


layers = nn.ModuleList(Layer(number) for number in range(LAYERS)).eval()


def decode(x: torch.Tensor) -> torch.Tensor:
    cache: dict = {}
    for _ in range(STEPS):
        for layer in layers:
            x = layer(x, cache)
    return x


# %% [markdown]
# ## Plain, and overlapped
#
# The whole decoding runs once for each micro-batch, each in a thread and with its own cache. At
# most one computes; the turn passes where one waits for its experts. It is the same for a model of
# transformers: `overlap(model.generate, ids, max_new_tokens=20)`.

# %%
overlap = eaas.DoubleBatchOverlap(client, num_micro_batches=2)
x = torch.randn(ROWS, D)
with torch.no_grad():
    plain = decode(x)
    began = time.perf_counter()
    in_a_row = [decode(half) for half in eaas.split_batch(x, 2)]
    between = time.perf_counter()
    overlapped = overlap(decode, x)
    print(f"in a row {between - began:.3f} s, overlapped {time.perf_counter() - between:.3f} s")
torch.testing.assert_close(overlapped, plain)

# %% [markdown]
# ## The timeline
#
# `torch.profiler` sees what each micro-batch does, in threads too if it is told to. Servers in
# other processes record for themselves (`torch-eaas server --trace FILE`); `torch-eaas merge-traces
# CLIENT SERVER... -o FILE` puts all on one clock, for https://ui.perfetto.dev. The beginning of the
# run: `#` a micro-batch computes, `.` it waits, `=` experts run.
#
# ```
# experts ============  ============     ======================    =======
# mb0     #...........#######........................######...............
# mb1           #....................######.....................######....
# ```


# %%
def picture(prof: torch.profiler.profile, columns: int = 64, part: float = 0.4) -> dict[str, str]:
    found = re.compile(r"eaas::(dispatch|wait|experts)/L\d(?:/(mb\d))?")
    spans = ((e.time_range, found.match(e.name)) for e in prof.events())
    events = sorted(((t.start, t.end, m) for t, m in spans if m), key=lambda event: event[:2])
    lines, scale = {}, columns / part / (events[-1][1] - events[0][0])
    for start, end, match in events:
        first, last = (int((at - events[0][0]) * scale) for at in (start, end))
        name, line = match[2] or match[1], lines.get(match[2] or match[1], "")
        # between two spans a micro-batch computes; between two batches experts do nothing
        line = line.ljust(first, "#" if match[2] and line else " ")
        lines[name] = line.ljust(last + 1, {"dispatch": "#", "wait": ".", "experts": "="}[match[1]])
    return dict(sorted(lines.items()))


threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
with torch.no_grad(), torch.profiler.profile(experimental_config=threads, acc_events=True) as prof:
    overlap(decode, x)
for name, line in picture(prof).items():
    print(f"{name:8}{line[:64]}")
    assert ("=" if name == "experts" else ".") in line

# %% [markdown]
# ## By hand
#
# A loop of your own needs no threads: dispatch one micro-batch, attend with the other, combine.


# %%
def decode_by_hand(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    caches: list[dict] = [{} for _ in parts]
    for _ in range(STEPS):
        for layer in layers:
            under_way = []
            for i, cache in enumerate(caches):
                parts[i] = layer.attend(parts[i], cache)
                under_way.append(layer.moe.dispatch(parts[i]))
            for i, answer in enumerate(under_way):
                parts[i] = torch.tanh(parts[i] + layer.moe.combine(answer))
    return parts


with torch.no_grad():
    by_hand = eaas.join_batches(decode_by_hand(eaas.split_batch(x, 2)))
torch.testing.assert_close(by_hand, plain)
client.close()
server.close()
