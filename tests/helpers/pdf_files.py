"""PDF files written by hand, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

SCAN = "scan"
"""A page that is a picture."""
_PICTURE = b"<</Type/XObject/Subtype/Image/Width 1/Height 1/ColorSpace/DeviceGray/BitsPerComponent 8/Length 1>>"


def pdf_of(pages: Sequence[str], locked: bool = False) -> bytes:
    """A PDF with the lines of each text on a page of its own; `locked`: it opens with a password that nobody has."""
    resources = b"<</Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>/XObject<</P 3 0 R>>>>"
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]/MediaBox[0 0 612 792]/Resources%s>>" % (len(pages), kids, resources),
        _PICTURE + b"stream\n\x80\nendstream",
    ]
    for page in pages:
        objects.append(b"<</Type/Page/Parent 2 0 R/Contents %d 0 R>>" % (len(objects) + 2))
        shown = b"".join(b"(%s) Tj T* " % line.encode() for line in page.splitlines())
        content = b"99 0 0 99 9 9 cm /P Do" if page == SCAN else b"BT /F 12 Tf 15 TL 50 700 Td %sET" % shown
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
    # The objects, then where each of them begins.
    body, starts = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        starts.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    lock = b"<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>" % (b"41" * 32, b"42" * 32)
    more = b"/Encrypt%s/ID[<00><00>]" % lock if locked else b""
    count = len(objects) + 1
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R%s>>\n" % (count, table, count, more)
    return body + end + b"startxref\n%d\n%%%%EOF\n" % len(body)
