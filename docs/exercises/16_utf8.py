"""Half a character is no text.

A token may be any bytes, and a character of UTF-8 may be spread over several tokens. Decode each token alone and "é"
becomes two question marks. Return the text to send after each token (it may be empty): only whole characters, and at
the end of the input whatever is left, with U+FFFD for bytes that are no text. (The article decodes everything again
for each token and cuts off what it had: quadratic, and wrong as soon as a character changes what stood before.)
"""

HINTS = (
    "The standard library has a decoder that remembers: codecs.getincrementaldecoder.",
    "errors='replace', and final=True for the last token.",
)


def deltas(tokens: list[bytes]) -> list[str]:
    raise NotImplementedError
