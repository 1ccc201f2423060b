import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torch_ring as hvd

hvd.init()  # 1
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else "cpu"  # 2
torch.manual_seed(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())  # 3
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = torch.nn.Linear(16, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())  # 4
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # 5
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 6

for epoch in range(3):
    sampler.set_epoch(epoch)  # 3
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    loss = hvd.allreduce(loss.detach())  # 7
    if hvd.rank() == 0:  # 8
        print(f"epoch {epoch}: loss {loss.item():.6f}")
        torch.save(model.state_dict(), "model.pt")
