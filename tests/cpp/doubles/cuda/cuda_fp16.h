// A stand-in, like cuda_runtime.h: nccl.h includes it, and uses nothing of it.
#pragma once
