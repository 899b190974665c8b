// Common parts of the functions that tests/hopper.py calls.
#pragma once
#include <stdio.h>

#include <exception>

#define FASTATTN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Call function(), which launches kernels. Return the message of its exception, null without one.
template <class Function>
const char* attempt(const Function& function) {
  static char message[2500];
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    snprintf(message, sizeof message, "%s", error.what());
    return message;
  }
}

}  // namespace
