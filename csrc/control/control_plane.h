// ControlPlane: a process's connections with the other ranks, beside the data: who lives, who has
// left, who has failed; and the listeners through which data connections are made when needed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/letters.h"
#include "control/loop.h"
#include "control/news.h"
#include "control/options.h"
#include "core/error.h"
#include "transport/socket_source.h"
#include "transport/wait_graph.h"

namespace torch_ring {

class ControlLoop;

/// One per process, for all of its process sets. It has one thread, which sleeps in poll(); a world
/// of one rank has none.
///
/// The ranks form a Chord ring (I. Stoica et al., "Chord: a scalable peer-to-peer lookup service",
/// SIGCOMM 2001) in the order of hosts: each has connections to the ranks at distances 1, 2, 4, ...
/// in both directions, 2 log2(n) of them at most. News is flooded through it: each rank passes on,
/// once, what it hears first. When a rank is lost, its neighbours on the ring connect to the next
/// living ones, and tell them all they know, so the survivors stay connected and nobody misses
/// anything.
///
/// Thread: any, but stop() and die() one at a time. Blocking: these; subscribe() and unsubscribe(),
/// while an observer is called.
class ControlPlane {
 public:
  using Address = torch_ring::Address;
  using Options = ControlOptions;

  /// Starts the thread, which begins to connect to the neighbours. Errors: Error(kInvalidArgument)
  /// if the options do not fit together.
  explicit ControlPlane(Options options);
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  /// The neighbours to which there is no connection yet; empty when the plane is complete.
  /// Errors, until then: Error(kPeerLost) if a rank has exited, Error(kMismatch) if one has another
  /// key, Error(kInternal) if this process lacks descriptors.
  std::vector<int> missing() const;

  /// Why it cannot accept anybody, or why the last attempt to connect to a neighbour failed, for
  /// the message of a timeout; empty if neither is so.
  std::string trouble() const;

  /// Why this process leaves, for the other ranks' errors: "ValueError: ... at train.py:41". For
  /// what leave() and stop() tell from now on.
  void give_reason(std::string why);

  /// Tells the other ranks that this one leaves a set in peace, after it has completed `rounds`
  /// rounds of the set's board. To be called before its data connections close. When all of its
  /// `members` have left, the set has ended: no memory of theirs is used any more. Blocking: no.
  void leave(std::uint64_t set, std::uint64_t rounds, int members);
  /// Precondition: leave() was called for the set.
  bool has_ended(std::uint64_t set) const;

  /// The ranks that have died or were silent for too long, as far as this one knows.
  std::vector<int> lost() const;

  /// The data connections that this rank has made or accepted so far, and that a SocketSource has
  /// taken.
  std::uint64_t connections() const;

  /// Says goodbye, waits until the neighbours have heard it (`patience` at most), joins the thread
  /// and closes all connections, also those that a SocketSource has not taken.
  void stop(std::chrono::milliseconds patience = kPartingPatience);

  /// Like stop(), but without a goodbye: the other ranks take this one for dead.
  void die();

  /// Tells `observer` of the ranks `members`, until unsubscribe() returns. What happened before is
  /// told at once. `set`: the set's number, the same on all ranks, never used twice; or that of its
  /// messages (set_numbers.h), which hears of the set's ranks, too.
  void subscribe(std::uint64_t set, std::vector<int> members, ControlObserver& observer);
  /// Also closes the set's data connections that nobody has taken, and refuses later ones.
  void unsubscribe(std::uint64_t set);

  /// Tells the other ranks that this one has given a set up, unless it knows that another one has:
  /// that is passed on already. Blocking: no.
  void fail(std::uint64_t set, const Error& cause);

  /// The data sockets of a set: `width` to each peer. `members`: its ranks in the world, by their
  /// rank in the set. The plane must outlive it. Its take() also throws the Error of the handshake,
  /// and Error(kInternal) after stop().
  std::unique_ptr<SocketSource> sockets(std::uint64_t set, std::vector<int> members, int width);

  /// The wait-for graph of a set, with its ranks by their rank in the set; `patience` is its own.
  /// The plane must outlive it.
  std::unique_ptr<WaitGraph> waits(std::uint64_t set, std::vector<int> members,
                                   std::chrono::milliseconds patience);

  /// Asks a rank of the world what it does. Returns the question's number. Blocking: no.
  std::uint64_t ask(int rank);
  /// Answers a rank's question; of a longer text the first Message::kTextBytes. Blocking: no.
  void answer(int rank, std::uint64_t number, std::string text);
  /// Asks a rank of the world for a sign of life. When it has answered, the observers know all that
  /// it told or passed on before. Returns the question's number, which is not 0. Blocking: no.
  std::uint64_t probe(int rank);
  bool has_answered(std::uint64_t probe) const;
  /// `reader` gets the questions and answers for this rank, one at a time, until stop(). An answer
  /// may never come: the rank is lost, or has no reader, or news on its way was lost with others.
  void read_letters(Letters::Reader reader);

  /// The plane's descriptors: a forked child closes them, or no peer would notice this process's
  /// death while the child lives. Call it before the fork: the child may find its lock taken.
  std::vector<int> descriptors() const;

 private:
  std::unique_ptr<ControlLoop> loop_;
};

}  // namespace torch_ring
