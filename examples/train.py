"""Train a small language model of Mamba-2 blocks to count: each token is the one before it plus one."""

import torch
import torch.nn.functional as F

from ssd.modules import Mamba2LM, Mamba2LMConfig

STEPS, BATCH, SEQLEN, VOCAB = 30, 8, 64, 32

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Mamba2LMConfig(d_model=64, n_layer=2, vocab_size=VOCAB,
                        ssm_cfg={"layer": "Mamba2", "headdim": 32, "d_state": 32, "chunk_size": 32})
model = Mamba2LM(config, device=device, variant="auto")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    start = torch.randint(VOCAB, (BATCH, 1), device=device)
    tokens = (start + torch.arange(SEQLEN + 1, device=device)) % VOCAB
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1).float(), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  loss {loss.item():.3f}")
