// Bids: the control connections that a rank still lacks.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/options.h"
#include "control/outgoing.h"

namespace torch_ring {

/// Of two ranks the higher one connects. The lower one waits, and asks now and then whether the
/// other still listens, for else nobody might notice its death.
///
/// Thread: one at a time. Blocking: no.
class Bids {
 public:
  /// For so long a rank whose listener is gone may still have left in peace: the word of it may be
  /// on its way.
  static constexpr std::chrono::milliseconds kGrace{250};
  static constexpr std::chrono::milliseconds kProbe{100};
  static constexpr std::chrono::seconds kSetupProbe{2};  // many ranks wait for one another then

  struct Outcome {
    std::vector<std::pair<int, Fd>> connected;   // by rank
    std::vector<int> refused;                    // nobody listens there
    std::vector<int> silent;                     // no connection for the heartbeat timeout
    std::optional<std::pair<int, Error>> error;  // of this process, or its key
  };

  /// `options` must outlive it.
  explicit Bids(const ControlOptions& options) : options_(options) {}

  /// Begins to bid for a connection to `peer` unless it does.
  void add(int peer, Clock::time_point now, bool setup);
  void remove(int peer) { bids_.erase(peer); }

  /// `setup`: all ranks listened a moment ago and none has been used, so a refusal counts at once;
  /// and its owner decides how long it waits.
  Outcome advance(const PollSet& polls, Clock::time_point now, bool setup);
  /// Forgets how long it has waited: this process was stopped meanwhile.
  void excuse(Clock::time_point now);

  /// Why the last attempt failed: "rank 3 (...): connect: ..."; empty if none has.
  const std::string& trouble() const noexcept { return trouble_; }

  void add_to(PollSet& polls);
  Clock::time_point due(bool setup) const;
  void append_descriptors(std::vector<int>& fds) const;
  void close() { bids_.clear(); }

 private:
  struct Bid {
    Bid(Clock::time_point now, Outgoing first) : since(now), outgoing(std::move(first)) {}
    Clock::time_point since;
    std::optional<Clock::time_point> refused_since;
    Outgoing outgoing;
  };

  const ControlOptions& options_;
  std::map<int, Bid> bids_;  // by rank
  std::string trouble_;
};

}  // namespace torch_ring
