// SPDX-License-Identifier: Apache-2.0
// A stand-in, like cuda_runtime.h: nccl.h includes it without using it.
#pragma once
