//! `cargo xtask bench page`: when a browser paints a served page, and what it needs to show 50,000 stacks and to zoom.

use crate::context::Context;
use crate::shell::run as run_command;
use crate::test;

pub const ABOUT: &str =
    "the web page in headless Chromium: first paint, time to show 50,000 stacks, zoom; a refresh beside a scrape";

pub fn run(context: &Context, _: &[String]) -> anyhow::Result<()> {
    let page = context.target().join("page-50000.html");
    let mut write = context.cargo_for_tests("test");
    write.args(["--quiet", "--package", "heapbpf-profile", "--lib", "--", "--ignored", "a_large_page_is_written"]);
    // The bundle is in the library. The browser is what is measured, so this build need not be fast.
    run_command(write.env("HEAPBPF_LARGE_PAGE", &page), context.options.verbose)?;
    // Tests run in their crate's directory, so the path must be absolute.
    test::bench_among_tests(context, ["company", "page::"], &[("HEAPBPF_LARGE_PAGE", page.as_os_str())])
}
