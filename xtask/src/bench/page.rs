//! `cargo xtask bench page`: what a browser needs to show 50,000 stacks, and to zoom.

use crate::context::Context;
use crate::shell::run;
use crate::test;

pub const ABOUT: &str = "the web page: time to show 50,000 stacks in headless Chromium, longest task, zoom";

pub fn run(context: &Context, _: &[String]) -> anyhow::Result<()> {
    let page = context.target_dir().join("page-50000.html");
    let mut write = context.cargo("test");
    write.args(["--quiet", "--release", "--package", "heapbpf-profile", "--lib", "--", "--ignored", "a_large_page_is_written"]);
    self::run_with(write.env("HEAPBPF_LARGE_PAGE", &page), context)?;
    test::bench_among_tests(context, "page", &[("HEAPBPF_LARGE_PAGE", page.as_os_str())])
}
