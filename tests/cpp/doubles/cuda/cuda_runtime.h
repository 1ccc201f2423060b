// SPDX-License-Identifier: Apache-2.0
// A stand-in for the CUDA header that nccl.h includes, which wheels have only in parts: nccl.h
// needs only size_t and the type of a stream.
#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;  // NOLINT: it is C
