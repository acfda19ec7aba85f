//! A self-contained HTML page: the web page over one profile, without a server.

use std::io;

use super::{FormatError, WriteOptions};
use crate::model::Profile;
use crate::page;
use crate::report::{ReportOptions, report};

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let shown = options.value_of(profile)?;
    let report = report(
        profile,
        &ReportOptions {
            width: 130,
            top: 30,
            sort: Some(shown),
            group_by: options.group_by,
            frames: options.frames,
            confidence: options.confidence,
            ..ReportOptions::default()
        },
    );
    let page = page::static_page(&page::page_data(profile, shown, options), &report, None)?;
    out.write_all(page.as_bytes())?;
    Ok(())
}
