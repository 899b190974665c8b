// Parts of the C and C++ run time that are newer than glibc 2.28 and GCC 8, the oldest that torch's own wheels run on.
// The libraries have their own, which they do not export, so that they load there whatever compiled them.
#include <new>
#include <sstream>

#if defined(__GLIBCXX__)
// glibc 2.32. GCC's shared pointers count without atomic instructions while it is not 0.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std {

// GCC 9.
template basic_stringstream<char>::basic_stringstream();
template basic_ostringstream<char>::basic_ostringstream();

// GCC 11. Its containers call it for sizes beyond the address space.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
#endif
