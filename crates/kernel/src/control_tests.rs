//! Checks which elements of the maps are written. No map is needed for that.

use super::*;

/// Adds a file with this many sites to tables with space for `capacity` files and sites. Returns the indices of its
/// first site and of the file.
fn add(places: &mut Places, capacity: u32, sites: usize) -> Result<(u32, u32), KernelError> {
    let mut file = 0;
    let first = places.add(sites, |place| {
        file = place.file;
        let fits = place.file < capacity && place.first + sites as u32 <= capacity;
        if fits { Ok(()) } else { Err(no_space("of this")) }
    })?;
    Ok((first, file))
}

#[test]
fn files_and_their_sites_are_numbered_in_turn() {
    let mut places = Places::default();
    let added: Vec<_> = [2, 0, 1].into_iter().map(|sites| add(&mut places, 8, sites).unwrap()).collect();
    assert_eq!(added, [(0, 0), (2, 1), (2, 2)]);
}

#[test]
fn a_file_that_does_not_fit_leaves_its_numbers_to_the_next() {
    let mut places = Places::default();
    assert_eq!(add(&mut places, 2, 1).unwrap(), (0, 0));
    let error = add(&mut places, 2, 2).unwrap_err();
    assert!(error.to_string().contains("no space"), "{error}");
    assert_eq!(add(&mut places, 2, 1).unwrap(), (1, 1));
}

#[test]
fn places_of_files_that_were_removed_are_used_again() {
    let mut places = Places::default();
    assert_eq!(add(&mut places, 4, 2).unwrap(), (0, 0));
    assert_eq!(add(&mut places, 4, 1).unwrap(), (2, 1));
    places.remove(0);
    assert_eq!(add(&mut places, 4, 3).ok(), None, "they are too few, and there is no space");
    for _ in 0..10 {
        assert_eq!(add(&mut places, 4, 1).unwrap(), (0, 0));
        places.remove(0);
    }
    assert_eq!(add(&mut places, 4, 2).unwrap(), (0, 0), "all of the place");
}

#[test]
fn the_constants_of_an_interval_stay_until_many_others_were_in_use() {
    let draw = |interval| DrawConstants { interval, ..DrawConstants::default() };
    let (mut draws, mut in_use) = (Draws::default(), None);
    let mut written = vec![DrawConstants::default(); DRAWS as usize];
    let mut set = |interval: u64| {
        let index = draws.index_of(draw(interval), |index| {
            assert!(in_use != Some(index), "the programs are reading it");
            written[index as usize] = draw(interval);
            Ok(())
        });
        let index = index.unwrap();
        assert_eq!(written[index as usize], draw(interval));
        in_use = Some(index);
        index
    };
    let most = u64::from(DRAWS);
    let first: Vec<u32> = (1..=most).map(&mut set).collect();
    assert_eq!(first, (0..DRAWS).collect::<Vec<u32>>());
    // An interval that is used again is no longer the oldest.
    assert_eq!((set(1), set(most + 1)), (0, 1));
    let later: Vec<u32> = (2..most).map(|interval| set(most + interval)).collect();
    assert_eq!(later, (2..DRAWS).collect::<Vec<u32>>());
    assert_eq!(set(7 * most), 0);
}
