/* HOOKED: maps a file of its own that has the name of an inline hook's memory. With HOOKED it also maps a page of that file elsewhere,
 * and a page of this program's code where the original would be set aside: laid out like a hooked process. */
#include <fcntl.h>
#include "truth.h"
int main(int argc, char **argv) {
  enum { BYTES = 0x20000, PAGE = 0x1000, SPARE = 0x1f000 };
  char name[64];
  char *place = mmap(0, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  snprintf(name, sizeof name, "heapbpf-inline-%llx-%x", (unsigned long long)(uintptr_t)place, BYTES);
  int fd = memfd_create(name, 0);
  if (place == MAP_FAILED || fd < 0 || ftruncate(fd, BYTES)) die("cannot make a file");
  if (pwrite(fd, "HEAPBPFi\1", 9, 0x1000) != 9) die("cannot write");
  if (mmap(place, BYTES, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, fd, 0) != place) die("cannot map");
  if (argc > 1 && *argv[1]) {
    int own = open("/proc/self/exe", O_RDONLY);
    char *spare = mmap(place + SPARE, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, own, 0);
    if (own < 0 || spare != place + SPARE) die("cannot map the program");
    if (mmap(0, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, SPARE) == MAP_FAILED) die("cannot map");
  }
  ready();
  report();
  return 0;
}
