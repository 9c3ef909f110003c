"""The two prompts `farfill up` sends: a long one that is worth prefilling far away, and a short one that is not."""

from __future__ import annotations

SHORT = "Name three things that are blue."

_ESSAY = """\
The town of Harrow Ferry lies where a slow river meets the sea, and for as long as anyone can remember it has been
known for its bread. In the old days every bakery in the town had its own oven. The ovens stood at the back of the
shops, they were lit at two in the morning, and they burned wood that was floated down the river from the hills. The
bakers liked it that way. A loaf that comes out of the oven six steps from the counter is a loaf that the customer
can smell, and a customer who can smell bread rarely leaves with only one.

But wood became dear. First the near hills were cut bare, and then the rafts had to come from farther and farther
away. The town itself had grown; there was no room for woodpiles, and the neighbours complained about smoke. In the
hills, on the other hand, there was wood enough for a thousand ovens, and there was space, and there was a stream that
could turn a mill. So a miller named Odile Marchetti wrote a letter to the bakers' guild. She proposed to build great
ovens up in the hills, next to the forest, and to send the bread down the river every morning in fast boats. The guild
would only have to sell it. "Heat is cheap here," she wrote, "and flour is cheap here. What is dear where you live is
what I have too much of. Let the heavy work be done where it is easy, and the last touch be given where the people
are."

The guild met for three evenings to talk about the letter. The oldest of the bakers, a man called Tobias Fenn, was
against it from the first word. Bread that has travelled, he said, is not bread, it is cargo. What if the river is
low? What if a boat strikes a rock? What if the boatmen drink? A town that cannot bake is a town that waits with open
mouths for someone else's weather. He had lived through two floods and one winter of ice, and each time the ovens
behind the shops had been what stood between the town and hunger.

A younger baker, Ines Calloway, answered him. She had been up to the hills and had seen the stream and the forest. She
agreed that the river could not be trusted on every day of the year. But she had counted the days. In ten years there
had been forty-one mornings on which no boat could have come down in time, and more than three thousand six hundred on
which it could. It made no sense, she said, to pay for wood on every morning because of those forty-one. It made
just as little sense to tear down the ovens behind the shops. Keep them, she said, keep them clean and keep some wood
dry, and light them when the boats do not come. For the small orders, the single rolls and the birthday cakes, do not
even send to the hills: a boat that carries one roll costs as much as a boat that carries a thousand.

In the end the guild did what guilds seldom do and tried both. Odile Marchetti built six ovens in the hills. A rule
was made, and because it was a good rule it was a short one: an order of more than fifty loaves goes up the river, an
order of less is baked at home. A boy with a slate stood at the landing stage and wrote down, for each order, where
it had been baked and why. If a boat was late by more than a quarter of an hour, the nearest shop lit its own oven
and baked what was missing, and the boy wrote that down as well. Customers were not told. They got their bread, and on
some mornings they got it a little later, and that was all they ever noticed.

The first months were hard. The boats carried whole loaves only when all of them were done, so they lay at the upper
landing half the night and then hurried. It was Ines Calloway who saw the mistake. There was no need to wait, she
said, for the last loaf before the first one left. Let every tray go on board as soon as it comes out of the oven, and
let the boats leave one after another. By the time the last tray is baked, the others will already be in town. After
that the journey cost almost nothing, because nearly all of it was over by the time the baking was done. Only the last
tray had to be waited for, and the last tray was small.

There were other lessons. Once a tray had fallen into the water and been fished out again, and the loaves looked sound
until somebody bit into one. From then on each tray was weighed at the top and weighed again at the bottom, and one
that did not agree to the ounce was thrown to the gulls and baked anew. Once a stranger had come to the landing stage
with bread of his own and had tried to sell it as Odile's. From then on every boat carried a paper with the guild's
seal, good for one journey and for one morning, and bread without a paper was refused, however good it looked. Once
two hills had been baking by two different recipes, and a customer had found that half of his order was salted and
half was not. From then on the recipe was written on every paper too, and an oven that baked by another one was not
asked again until it had been put right.

Tobias Fenn never said that he had been wrong, and perhaps he had not been. In the fourth year there came a winter in
which the river froze for nine days. On the first of these mornings the boy with the slate wrote the same word in
every line, and the ovens behind the shops were lit one after another, and there was bread. It was dearer, and there
was less of it, and the queue went round the corner; but there was bread, and nobody in the queue could have said
where on other days it came from. Fenn stood in front of his oven with his sleeves rolled up and looked, people said,
like a man who has been proved right by the weather. Ines Calloway brought him coffee. "This," she said to him, "is
why I never wanted to tear them down." He took the cup. "And this," he said after a while, nodding at the cold, "is
why I never minded that you built the others. I should not like to do it on all the other days of the year."
"""


def long_chat_prompt() -> str:
    """About 1 500 tokens that ask for a summary."""
    return f"{_ESSAY}\nSummarize this story in two sentences."


def long_base_prompt() -> str:
    """The same for a base model, which continues text and follows no instruction."""
    return f"{_ESSAY}\nIn short, the story is about"
