// mcp_kernels._shm: shared memory of one host, for Python. No torch.
#include "shm/module.h"

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <system_error>

#include "shm/segment.h"
#include "shm/wait.h"

namespace py = pybind11;
using mcp::shm::Segment;

namespace {

// OSError(errno, message) makes the subclass that Python users expect, FileExistsError and so on.
void raise_os_error(const std::system_error& failure) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(failure.code().value(), failure.what()).ptr());
}

size_t positive(py::ssize_t bytes) {
  if (bytes < 1) {
    throw std::invalid_argument("Segment: bytes must be >= 1, got " + std::to_string(bytes));
  }
  return static_cast<size_t>(bytes);
}

}  // namespace

PYBIND11_MODULE(_shm, m) {
  m.doc() = "Memory that the processes of one host share, and their collectives.";
  mcp::shm::add_group(m);
  mcp::shm::add_workspace(m);
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const std::system_error& failure) {
      raise_os_error(failure);
    }
  });
  m.def("host_id", &mcp::shm::host_id,
        "A string that two processes share exactly when they can share segments.");
  m.def("waited_s", &mcp::shm::waited_s,
        "Seconds that this thread has waited for other ranks, waits of a few microseconds left "
        "out.");
  py::class_<Segment>(
      m, "Segment", py::buffer_protocol(),
      "Bytes under a name in /dev/shm; a writable buffer (memoryview, numpy, torch).")
      .def_static(
          "create",
          [](const std::string& name, py::ssize_t bytes) {
            const size_t size = positive(bytes);
            py::gil_scoped_release unlocked;  // reserving gigabytes takes a while
            return Segment::create(name, size);
          },
          py::arg("name"), py::arg("bytes"),
          "Make a new segment of zeros; its name goes when this object does.")
      .def_static(
          "open",
          [](const std::string& name, py::ssize_t bytes) {
            return Segment::open(name, positive(bytes));
          },
          py::arg("name"), py::arg("bytes"), "Map a segment that another process created.")
      .def("unlink", &Segment::unlink, "Take the name away; mappings stay usable.")
      .def_property_readonly("name", &Segment::name)
      .def_property_readonly("nbytes", &Segment::bytes)
      .def_buffer([](Segment& segment) {
        return py::buffer_info(static_cast<unsigned char*>(segment.data()),
                               static_cast<py::ssize_t>(segment.bytes()), false);
      });
}
