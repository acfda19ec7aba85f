//! The thread that shows the screen. It draws what arrives, and passes keys to the view.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_profile::formats::{self, WriteOptions};
use heapbpf_profile::model::Profile;
use heapbpf_record::output::{Output, default_path};
use heapbpf_top::{Action, Options, Status, Theme, Top};

use super::Look;
use super::feed::{Feed, News};
use super::key_decoder::KeyDecoder;
use super::terminal::{Frames, Input, Terminal};

/// Interval between checks of the terminal's size.
const TICK: Duration = Duration::from_millis(100);
/// After every so many profiles, their number and the elapsed time are logged.
const SAID_EVERY: u64 = 20;
/// Format of what `w` writes: everything that is known, so that it can be compared with significance.
const FORMAT: &str = "json.gz";

/// Shows what the feed has until the user quits or the terminal is gone.
///
/// # Errors
/// The terminal cannot be written.
pub fn show(terminal: &Arc<Terminal>, feed: &Feed, source: String, look: Look) -> io::Result<()> {
    let theme = Theme { color: look.color };
    let mut top = Top::new(Options { source, confidence: look.confidence, theme, frames: look.frames });
    let mut frames = ratatui_core::terminal::Terminal::new(Frames::new(Arc::clone(terminal)))?;
    let mut size = frames.size()?;
    let mut changed = true;
    let (mut keys, mut typed) = (KeyDecoder::default(), [0; 256]);
    let (begun, mut shown) = (Instant::now(), 0_u64);
    loop {
        let before = thread_cpu_time();
        let is_new = take(&mut top, feed);
        if changed || is_new {
            frames.draw(|frame| top.draw(frame.buffer_mut()))?;
        }
        if is_new {
            feed.shown_in(thread_cpu_time().saturating_sub(before));
            shown += 1;
            if shown.is_multiple_of(SAID_EVERY) {
                say(shown, begun);
            }
        }
        changed = false;
        let read = match terminal.wait(TICK) {
            Input::Some => terminal.read(&mut typed)?,
            Input::None => &[],
            Input::Gone => return Ok(()),
        };
        for key in keys.of(read) {
            match top.key(key) {
                Some(Action::Quit) => {
                    say(shown, begun);
                    return Ok(());
                }
                Some(Action::Write) => top.say(write(top.profile(), look.confidence)),
                Some(Action::Redraw) => frames.clear()?,
                None => {}
            }
            changed = true;
        }
        let now = frames.size()?;
        changed |= std::mem::replace(&mut size, now) != now;
    }
}

fn say(shown: u64, begun: Instant) {
    log::debug!("{shown} profiles were shown in {:.1} s", begun.elapsed().as_secs_f64());
}

fn take(top: &mut Top, feed: &Feed) -> bool {
    let News { totals, profile, away, past } = feed.news();
    let is_new = totals.is_some() || profile.is_some() || away.is_some() || past.is_some();
    past.into_iter().for_each(|past| top.remember(past));
    totals.into_iter().for_each(|totals| top.take_totals(totals));
    if let Some(profile) = profile {
        let before = top.profile().cloned();
        top.take(profile);
        before.into_iter().for_each(|before| feed.give_back(before));
    }
    if let Some(Some(why)) = away {
        top.set_status(Status::Away(why));
    }
    is_new
}

/// Writes the profile that is shown. Returns a message that says where.
fn write(profile: Option<&Arc<Profile>>, confidence: f64) -> String {
    let Some(profile) = profile else { return "there is no profile yet".into() };
    let Ok(format) = formats::by_name(FORMAT) else { return format!("{FORMAT} is not built in") };
    let only = match profile.processes.as_slice() {
        [process] => Some((process.comm.as_str(), process.pid)),
        _ => None,
    };
    let path = default_path(Path::new("."), only, format);
    let options = WriteOptions { confidence, ..WriteOptions::default() };
    match Output::new(&path, format, false).write(profile, &options) {
        Ok(_) => format!("wrote {}", path.display()),
        Err(error) => format!("not written: {error}"),
    }
}
