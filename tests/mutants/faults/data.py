# SPDX-License-Identifier: Apache-2.0
"""Faults of data: which samples each rank reads, and where a run goes on."""

from __future__ import annotations

from faults.fault import Fault, Room

SAMPLER = "torch_ring/data/sampler.py"
SPLIT = "torch_ring/data/split.py"
PIPELINE = "torch_ring/data/pipeline.py"
PREFETCHER = "torch_ring/data/prefetcher.py"

# fmt: off
FAULTS = (
    Fault(
        "same_samples", "all ranks read the samples of rank 0", SAMPLER,
        "begin = self._begin + self.process_set.rank()", "begin = self._begin",
        tests=("data/test_sharded_sampler.py::test_every_sample_is_taken_once",),
    ),
    Fault(
        "uneven", "in training a rank has one batch more than the others", SAMPLER,
        "(left % self.process_set.size() if self.drop_last else 0)", "0",
        tests=("data/test_sharded_sampler.py::test_every_sample_is_taken_once",),
    ),
    Fault(
        "one_order", "all epochs have the same order", SAMPLER,
        'f"{self.seed} {self._epoch}".encode()', 'f"{self.seed}".encode()',
        tests=("data/test_sharded_sampler.py::test_epochs_and_seeds_have_orders_of_their_own",),
    ),
    Fault(
        "neighbouring_seeds", "two seeds have the same orders, one epoch apart", SAMPLER,
        'zlib.crc32(f"{self.seed} {self._epoch}".encode())', "self.seed + self._epoch",
        tests=("data/test_sharded_sampler.py::test_epochs_and_seeds_have_orders_of_their_own",),
    ),
    Fault(
        "own_samples_only", "the progress counts the samples of one rank", SAMPLER,
        "self._taken += samples * self.process_set.size()", "self._taken += samples",
        tests=("data/test_sharded_sampler.py::test_a_resume_repeats_and_skips_none",),
    ),
    Fault(
        "other_sampler", "the state of a sampler with another seed is taken", SAMPLER,
        'for name in ("length", "shuffle", "seed"):', 'for name in ("length", "shuffle"):',
        tests=("data/test_sharded_sampler.py::test_the_state_of_another_sampler_is_refused",),
    ),
    Fault(
        "states_differ", "ranks go on from different states on another number of ranks", SAMPLER,
        "if before != share.size:", "if False:",
        tests=("data/test_resumed_loaders.py::test_states_that_differ_are_refused",),
    ),
    Fault(
        "own_position", "a loader's state counts the samples of one rank", SAMPLER,
        "position = share.begin + self._given * share.size",
        "position = share.begin + self._given",
        tests=("data/test_resumed_loaders.py::test_a_resume_repeats_and_skips_none",),
    ),
    Fault(
        "epoch_repeated", "a finished epoch is repeated after a resume", SAMPLER,
        "if self._has_ended or position >= share.end:", "if self._has_ended:",
        tests=("data/test_resumed_loaders.py",),
    ),
    Fault(
        "epoch_not_whole", "the epoch after a resume is only its rest", SAMPLER,
        "if self._is_resumed and not self._advanced:", "if False:",
        tests=("data/test_resumed_loaders.py::test_the_epoch_after_a_resume_is_whole",),
    ),
    Fault(
        "last_round", "the last elements of a stream, fewer than ranks, go to some ranks", SPLIT,
        "(count > self._rank and not self._split.equal)", "count > self._rank",
        tests=("data/test_split.py::test_every_element_is_taken_once",),
    ),
    Fault(
        "all_workers", "every worker of a rank yields all elements of the rank", SPLIT,
        "if index // self._stride % self._workers == self._worker:", "if True:",
        tests=("data/test_split.py::test_every_element_is_taken_once",),
    ),
    Fault(
        "dealt_twice", "data that deal themselves to workers are dealt twice", SPLIT,
        "info, torch_worker._worker_info = torch_worker._worker_info, None",
        "info = torch_worker._worker_info",
        tests=("data/test_split.py::test_data_that_deal_themselves_to_workers_are_not_dealt_twice",),
    ),
    Fault(
        "spawned_lost", "a worker that is not forked does not know its rank", SPLIT,
        "place = (ranks.rank(), ranks.size()) if ranks.included() else None", "place = None",
        tests=("data/test_split.py::test_workers_that_are_not_forked_know_their_rank",),
    ),
    Fault(
        "old_ranks", "workers that outlive a change of the ranks deal as before", SPLIT,
        "each.is_over.fill_(True)", "pass",
        tests=("data/test_split.py::test_workers_that_outlive_the_ranks_say_so",),
    ),
    Fault(
        "stride_lost", "on another number of ranks a resumed stream is dealt to other workers",
        SPLIT,
        'self._read, self._stride = state["read"], state["stride"]', 'self._read = state["read"]',
        tests=("data/test_split.py::test_a_resume_repeats_and_skips_none",),
    ),
    Fault(
        "worker_count", "a state of another number of workers is taken", SPLIT,
        'if state["workers"] != self._workers:', "if False:",
        tests=("data/test_split.py::test_a_state_belongs_to_a_number_of_workers",),
    ),
    Fault(
        "iterator_twice", "a second iteration over an iterator yields nothing, silently", SPLIT,
        "if self._split.is_used:", "if False:",
        tests=("data/test_split.py::test_an_iterator_is_split_for_one_iteration",),
    ),
    Fault(
        "last_batch", "the prefetcher loses the last batch", PREFETCHER,
        "        if ahead:\n            yield self._arrived(*ahead.pop())\n", "",
        tests=("data/test_prefetcher.py",),
    ),
    Fault(
        "memory_reused", "a batch's memory is used again while the model works on it", PREFETCHER,
        "tensor.record_stream(current)", "None",
        tests=("data/test_prefetcher.py",),
    ),
    Fault(
        "copy_not_awaited", "the model works on a batch before its copy is done", PREFETCHER,
        "current.wait_event(copied)", "pass",
        tests=("data/test_prefetcher.py",),
    ),
    Fault(
        "epoch_not_advanced", "a pipeline's last batch does not end the epoch", PIPELINE,
        "if index == last:", "if False:",
        tests=("data/test_input_pipeline.py",),
    ),
    Fault(
        "sampler_moved", "a report moves the sampler to another epoch", PIPELINE,
        "    finally:\n        sampler.load_state_dict(state)\n", "    finally:\n        pass\n",
        tests=("data/test_input_pipeline.py::test_report",),
    ),
    Fault(
        "fastest_rank", "the rate is that of the fastest rank", PIPELINE,
        "firsts_s.max().item(), rates.min().item()", "firsts_s.max().item(), rates.max().item()",
        tests=("data/test_input_pipeline.py::test_summary_of_waits",),
    ),
    Fault(
        "cpus_not_shared", "ranks that share CPUs each start workers for all of them", PREFETCHER,
        "int(cpus / ranks)", "int(cpus)",
        tests=("data/test_input_pipeline.py::test_ranks_divide_the_cpus_that_they_share",),
    ),
)
# fmt: on

ROOM = Room(FAULTS, ("tests/data",))
