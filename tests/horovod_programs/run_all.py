"""Runs the programs one after the other in one job: what a process costs is paid once."""

import gan
import imagenet
import mnist
import synthetic

import torch_ring as hvd

hvd.init()
mnist.main(["--fp16-allreduce", "--gradient-predivide-factor", "2"])
hvd.shutdown()
if hvd.is_initialized():
    raise SystemExit("shutdown() did nothing")
mnist.main(["--use-adasum", "--lr", "0.1"])
imagenet.main([])
imagenet.main(["--fp16-allreduce"])
synthetic.main(["--fp16-allreduce"])
synthetic.main(["--use-adasum"])
gan.main()
print(f"rank {hvd.rank()} of {hvd.size()}: all programs", flush=True)
