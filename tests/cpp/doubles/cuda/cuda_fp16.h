// A stand-in, as cuda_runtime.h: nccl.h includes it, and uses nothing of it.
#pragma once
