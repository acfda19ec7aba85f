/* Threads that add to counters, one per CPU, in restartable sequences (rseq(2)): a thread that was away in the middle of one has to
 * begin it anew, else what others added meanwhile is lost. Each also allocates. Prints READY, goes on until there is a line, and
 * prints how many sequences were finished, and how many of them were lost. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/rseq.h>
#include <unistd.h>

enum { THREADS = 6, MOST_CPUS = 1024 };
static struct {
  long count;
  char padding[120];
} of_cpu[MOST_CPUS];
static volatile int is_over;

/* Adds one to this CPU's counter, slowly. Returns whether it came to the end. */
static int add(volatile struct rseq *area) {
  uint32_t cpu = area->cpu_id_start;
  long *counter = &of_cpu[cpu % MOST_CPUS].count;
  __asm__ goto(
      ".pushsection __rseq_cs, \"aw\"\n"
      ".balign 32\n"
      "3: .long 0, 0\n"
      ".quad 1f, 2f - 1f, 4f\n"
      ".popsection\n"
      "leaq 3b(%%rip), %%rax\n"
      "movq %%rax, %[sequence]\n"
      "1: cmpl %[cpu], %[now]\n"
      "jnz 4f\n"
      "movq %[counter], %%rdx\n"
      "movl $2000, %%ecx\n"
      "5: decl %%ecx\n"
      "jnz 5b\n"
      "incq %%rdx\n"
      "movq %%rdx, %[counter]\n"
      "2:\n"
      ".pushsection __rseq_failure, \"ax\"\n"
      ".byte 0x0f, 0xb9, 0x3d\n"
      ".long 0x53053053\n"
      "4: jmp %l[aborted]\n"
      ".popsection\n"
      :
      : [sequence] "m"(area->rseq_cs), [cpu] "r"(cpu), [now] "m"(area->cpu_id), [counter] "m"(*counter)
      : "memory", "cc", "rax", "rcx", "rdx"
      : aborted);
  return 1;
aborted:
  return 0;
}

static void *run(void *finished) {
  volatile struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
  long count = 0;
  while (!is_over) {
    count += add(area);
    if (count % 16 == 0) {
      void *p = malloc(100);
      __asm__ volatile("" : "+r"(p) : : "memory");
      free(p);
    }
  }
  *(long *)finished = count;
  return NULL;
}

static void *wait_for_line(void *unused) {
  char c = 0;
  while (c != '\n' && read(0, &c, 1) == 1) {}
  is_over = 1;
  return unused;
}

int main(void) {
  if (!__rseq_size) {
    printf("READY %d\nno restartable sequences\n", getpid()), fflush(stdout);
    wait_for_line(NULL);
    return 0;
  }
  pthread_t threads[THREADS], waiting;
  long finished[THREADS], added = 0, all = 0;
  for (int i = 1; i < THREADS; i++) pthread_create(&threads[i], NULL, run, &finished[i]);
  pthread_create(&waiting, NULL, wait_for_line, NULL);
  printf("READY %d\n", getpid()), fflush(stdout);
  /* The first thread is in a sequence nearly all the time. */
  run(&finished[0]);
  for (int i = 1; i < THREADS; i++) pthread_join(threads[i], NULL);
  pthread_join(waiting, NULL);
  for (int i = 0; i < THREADS; i++) all += finished[i];
  for (int i = 0; i < MOST_CPUS; i++) added += of_cpu[i].count;
  printf("%ld lost of %ld\n", all - added, all), fflush(stdout);
  wait_for_line(NULL);
  return 0;
}
