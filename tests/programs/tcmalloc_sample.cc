// Preloaded with tcmalloc: writes its sampled heap profile to the file named by TCMALLOC_SAMPLE_OUT when the process
// exits. (tcmalloc has a variable that starts sampling, but none that writes the samples.)
#include <cstdlib>
#include <fstream>
#include <string>

#include <gperftools/malloc_extension.h>

__attribute__((destructor)) static void write_sample() {
  const char *name = getenv("TCMALLOC_SAMPLE_OUT");
  if (!name) return;
  std::string text;
  MallocExtension::instance()->GetHeapSample(&text);
  std::ofstream(name) << text;
}
