// Memory that the processes of one host share, under a name in /dev/shm.
//
// Knows no Python and no torch. Every failure is a std::system_error with the errno and a message
// that names the segment, or std::invalid_argument for a wrong name or size.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace mcp::shm {

// A string that two processes share exactly when they can share segments: the boot of the machine,
// the file system behind /dev/shm and the IPC namespace. Containers of one machine may differ.
std::string host_id();

class Segment {
 public:
  // Makes a new segment of `bytes` zeros that only this user can open, and reserves its memory now:
  // a full /dev/shm is an error here, not a SIGBUS at a later store.
  static Segment create(const std::string& name, size_t bytes);

  // Maps a segment that another process created, which must have exactly `bytes`.
  static Segment open(const std::string& name, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  Segment& operator=(Segment&&) = delete;

  // Unmaps; the process that created the segment also takes its name away.
  ~Segment();

  // Takes the name away; mappings stay usable, here and in the processes that opened it. A name
  // that is gone, or that means another segment by now, is left alone.
  void unlink();

  // Takes away a name of this user, whatever it means; a name that is gone is no error.
  static void remove(const std::string& name);

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment(std::string name, size_t bytes, bool creator);

  std::string name_;
  size_t bytes_;
  void* data_ = nullptr;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  pid_t creator_ = 0;  // 0 when opened; a forked child is not the creator
};

}  // namespace mcp::shm
