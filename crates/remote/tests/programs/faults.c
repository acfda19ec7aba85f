/* The first thread runs on a stack behind which lies memory whose pages another thread provides (userfaultfd), as emulators and garbage
 * collectors do. Ends on SIGTERM and prints OK, or for how long it stood still. */
#define _GNU_SOURCE
#include "hooked.h"
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { STACK = 64 << 10, BEHIND = 1 << 20, PAGE = 4096 };

static volatile sig_atomic_t stop;
static int faults;
static double longest;

static void on_term(int signal) { (void)signal, stop = 1; }

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void *provide(void *unused) {
  static char page[PAGE] __attribute__((aligned(PAGE)));
  struct uffd_msg fault;
  while (read(faults, &fault, sizeof fault) == sizeof fault) {
    struct uffdio_copy copy = {
        .dst = fault.arg.pagefault.address & -(uint64_t)PAGE, .src = (uintptr_t)page, .len = PAGE};
    ioctl(faults, UFFDIO_COPY, &copy);
  }
  return unused;
}

static void work(void) {
  double last = now();
  for (long n = 0; !stop; n++) {
    if (hooked(n) != 3 * n + 7) _exit(3);
    double time = now();
    if (time - last > longest) longest = time - last;
    last = time;
    if (n % 64 == 0) usleep(200);
  }
}

int main(void) {
  signal(SIGTERM, on_term);
  faults = syscall(SYS_userfaultfd, O_CLOEXEC);
  struct uffdio_api api = {.api = UFFD_API};
  char *memory = mmap(0, STACK + BEHIND, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct uffdio_register behind = {{(uintptr_t)memory + STACK, BEHIND}, UFFDIO_REGISTER_MODE_MISSING};
  if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || ioctl(faults, UFFDIO_REGISTER, &behind)) {
    puts("UNABLE"), fflush(stdout);
    return 1;
  }
  pthread_t provider;
  pthread_create(&provider, 0, provide, 0);
  printf("READY %lx\n", (unsigned long)hooked), fflush(stdout);
  __asm__ volatile("mov %%rsp, %%rbx\n mov %[top], %%rsp\n call *%[work]\n mov %%rbx, %%rsp\n"
                   :
                   : [top] "r"(memory + STACK), [work] "r"(work)
                   : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
  printf(longest < 1 ? "OK %.3f s\n" : "STOOD %.3f s\n", longest), fflush(stdout);
  _exit(0);
}
