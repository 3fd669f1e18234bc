# %% [markdown]
# # 1. A Mixture-of-Experts layer whose experts live elsewhere
#
# The experts of a MoE layer are functions: hidden states in, hidden states out, nothing kept. So
# they can run in *servers*, and the model that routes the tokens is their *client*. Here both are
# threads of one process; with the default transport they are processes, and nothing else changes.

# %% [markdown]
# ## The layer
#
# Eight experts go round three servers, so that each expert has two holders. `RemoteMoE` stands
# where a MoE layer stood: a router, the experts (remote), and a shared expert if there is one.

# %% README
import torch

import torch_eaas as eaas
from torch_eaas.testing import random_experts

weights = random_experts(hidden_size=64, intermediate_size=96, layers=[0], num_experts=8)
transport = eaas.LoopbackTransport()
servers = []
for i in range(3):
    pool = eaas.ExpertPool(hidden_size=64, intermediate_size=96)
    pool.update({(0, e): weights[0, e] for e in eaas.share([0], 8, i, 3, copies=2)[0]})
    server = eaas.ExpertServer(pool, eaas.ServerConfig(name=f"s{i}"), transport=transport)
    servers.append(server.serve_in_background())

config = eaas.ClientConfig(hidden_size=64, top_k=2)
client = eaas.Client(config, servers=[s.address for s in servers], transport=transport)
experts = eaas.RemoteExperts(client, layer=0, num_experts=8, top_k=2)
moe = eaas.RemoteMoE(eaas.SoftmaxTopKRouter(64, 8, 2), experts).eval()

with torch.no_grad():
    x = torch.randn(5, 64)
    before = moe(x)
    servers[0].close()  # a server dies; each of its experts has another holder
    after = moe(x)
torch.testing.assert_close(before, after)

# %% [markdown]
# ## What the layer computed
#
# The same sum, expert by expert, on this side:

# %%
with torch.no_grad():
    ids, gates = moe.router(x)
    expected = torch.zeros(5, 64)
    for token in range(5):
        for expert, gate in zip(ids[token].tolist(), gates[token], strict=True):
            w = weights[0, expert]
            hidden = torch.nn.functional.silu(w.gate_ID @ x[token]) * (w.up_ID @ x[token])
            expected[token] += gate * (w.down_DI @ hidden)
torch.testing.assert_close(before, expected)

# %% [markdown]
# ## Two halves
#
# `dispatch` sends the tokens and returns at once; `combine` waits. Between the two the client is
# free: `RemoteMoE` runs the shared expert there, and double-batch overlap another batch.

# %%
with torch.no_grad():
    ticket = experts.dispatch(x, ids, gates)
    meanwhile = x @ x.T  # any work of your own
    out = experts.combine(ticket, add=x)
torch.testing.assert_close(out, expected + x)

# %% [markdown]
# ## What happened
#
# The client counts what it did; `resends` are the requests that another holder answered. There are
# none if the death was known before the tokens were sent: then they went to that holder at once.

# %%
print(client.counters())
assert client.counters()["dispatches"] == 3
client.close()
for server in servers:
    server.close()
