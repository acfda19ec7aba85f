//! Keys of the terminal as keys of the view.

use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use heapbpf_top::Key;

/// The key of an event, if the view knows it.
pub fn key(event: &Event) -> Option<Key> {
    let Event::Key(KeyEvent { code, modifiers, kind, .. }) = event else { return None };
    if *kind == KeyEventKind::Release {
        return None;
    }
    if modifiers.contains(KeyModifiers::CONTROL) {
        return match code {
            KeyCode::Char('c') => Some(Key::Interrupt),
            KeyCode::Char('l') => Some(Key::Redraw),
            _ => None,
        };
    }
    Some(match code {
        KeyCode::Char(c) => Key::Char(*c),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left => Key::Left,
        KeyCode::Right => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab => Key::Tab,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_with_control_are_other_keys() {
        let event = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        assert_eq!(key(&event(KeyCode::Char('c'), KeyModifiers::NONE)), Some(Key::Char('c')));
        assert_eq!(key(&event(KeyCode::Char('c'), KeyModifiers::CONTROL)), Some(Key::Interrupt));
        assert_eq!(key(&event(KeyCode::Char('x'), KeyModifiers::CONTROL)), None);
        assert_eq!(key(&event(KeyCode::Char('F'), KeyModifiers::SHIFT)), Some(Key::Char('F')));
        assert_eq!(key(&event(KeyCode::F(1), KeyModifiers::NONE)), None);
        assert_eq!(key(&Event::Resize(80, 24)), None);
    }
}
