// The parts that the Python module _shm is put together from.
#pragma once

#include <pybind11/pybind11.h>

namespace mcp::shm {

// Group, its transfers and its enumerations.
void add_group(pybind11::module_& m);

// Workspace, which holds a group.
void add_workspace(pybind11::module_& m);

}  // namespace mcp::shm
