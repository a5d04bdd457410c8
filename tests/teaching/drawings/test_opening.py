"""What a page shows first, and the words on its buttons."""

from __future__ import annotations

from drawn import demo_page


def test_the_page_opens_on_batching_and_says_what_to_look_at() -> None:
    """Pinned: it opened on some twenty small matrices, and "On" beside "Play" read as a switch."""
    page = demo_page()
    lesson = page.partition('id="batching-title"')[2].partition('class="lesson">')[2]
    assert lesson.startswith("Look at the hatched cells. By requests, ")
    assert ">Next</button>" in page
    assert ">On</button>" not in page
