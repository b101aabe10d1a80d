"""Five texts of different kinds, each 200 tokens or more: what a forward pass is compared on."""

from __future__ import annotations

PROSE = """\
The lighthouse keeper climbed the spiral stairs every evening an hour before sunset, carrying a can of oil
in one hand and a lantern in the other. From the gallery he could see the whole bay: the fishing boats
coming home in a ragged line, the gulls following them, and far out on the horizon the smoke of a steamer
that never seemed to come any closer. He trimmed the wick, polished the glass until it was invisible, and
waited for the first star. In forty years he had missed only one night, the night of the great storm, when
the sea broke the lower door and the stairs became a waterfall. People in the village still spoke of it.
They said that the light had gone out for the length of a single prayer, and that in this time three ships
had turned around in the dark, as if each of them had heard somebody call. The keeper himself never spoke of
it. When he was asked, he would only say that oil was expensive, that glass was fragile, and that the sea
was patient.
"""

CODE = '''\
def merge_sorted(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def merge_sort(values: list[int]) -> list[int]:
    if len(values) < 2:
        return values
    middle = len(values) // 2
    return merge_sorted(merge_sort(values[:middle]), merge_sort(values[middle:]))


if __name__ == "__main__":
    print(merge_sort([5, 2, 9, 1, 5, 6, 0, 3]))
'''

NUMBERS = """\
year   rainfall (mm)   temperature (C)   harvest (t)
1990       512.4            14.2            1203
1991       498.0            14.9            1187
1992       601.7            13.8            1250
1993       455.2            15.1             998
1994       530.9            14.4            1221
1995       575.3            14.0            1266
1996       488.8            14.7            1130
1997       620.1            13.5            1301
1998       402.6            15.8             870
1999       549.5            14.3            1240
Mean       523.5            14.5            1167
"""

DIALOGUE = """\
<|im_start|>system
You are a patient teacher who answers in short sentences.<|im_end|>
<|im_start|>user
Why is the sky blue during the day and red in the evening?<|im_end|>
<|im_start|>assistant
Sunlight is a mixture of all colours. When it passes through the air, tiny molecules scatter it in every direction. Blue
light has a short wavelength and is scattered much more than red light, so blue reaches your eyes from all over the sky.
In the evening the light has to travel through much more air. Most of the blue is scattered away before it arrives, and
what is left is orange and red.<|im_end|>
<|im_start|>user
Then why is the sky not violet? Violet light has an even shorter wavelength.<|im_end|>
<|im_start|>assistant
That is a very good question. There are three reasons. First, the sun emits less violet than blue. Second, some of the
violet is absorbed high up in the atmosphere. Third, our eyes are less sensitive to violet than to blue.<|im_end|>
<|im_start|>user
And what colour is the sky on Mars?<|im_end|>
<|im_start|>assistant
"""

LANGUAGES = """\
Der Fluss fließt langsam durch das breite Tal, und am Ufer stehen alte Weiden. Le marché ouvre à
six heures du matin, et les pêcheurs vendent leur poisson avant midi. El niño corrió por la
plaza con una cometa roja en la mano. 今天的天气很好， 我们去公园散步吧。Завтра утром поезд отправляется в девять
часов. 電車は午後三時に駅に着きます。Η θάλασσα ήταν ήρεμη.
"""

PASSAGES = {"prose": PROSE, "code": CODE, "numbers": NUMBERS, "dialogue": DIALOGUE, "languages": LANGUAGES}
