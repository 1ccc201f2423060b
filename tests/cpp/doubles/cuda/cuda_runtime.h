// A stand-in for the CUDA header that nccl.h includes, which wheels bring only in parts: nccl.h
// needs no more of it than size_t and what a stream is.
#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;  // NOLINT: it is C
