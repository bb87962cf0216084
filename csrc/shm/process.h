// Who a process is, and whether it still lives: an id alone may belong to another process by now.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace mcp::shm {

struct Process {
  int64_t id = 0;           // of the process, in its own PID namespace
  uint64_t start = 0;       // clock ticks from boot to its start; with `id` it means one process
  uint64_t name_space = 0;  // inode of its PID namespace: ids mean nothing to another one
};

// Throws std::runtime_error where /proc is not mounted.
Process this_process();

// Whether `process` has ended, zombies included. False when this process cannot know: then only a
// timeout ends a wait. Cost: one small read from /proc, about 10 us.
bool has_ended(const Process& process);

// Cores that this process may use at a time: its affinity, cut by the CPU quota of its cgroup.
int usable_cores();

// Grows by one in the child at each fork: what was made before belongs to the parent.
uint64_t fork_generation();

// Takes away names in /dev/shm whose creator is gone: what a group leaves when all its ranks are
// killed in the moment between creating their segments and mapping each other's. Returns how many.
int remove_orphans();

// "mcp-<user>-<namespace>-<id>-<start>-<suffix>": says who made a segment, for remove_orphans.
std::string segment_name(const Process& creator, const std::string& suffix);

}  // namespace mcp::shm
