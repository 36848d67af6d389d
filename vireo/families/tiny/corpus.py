"""The text that the tiny tokenizer's merges come from: what its demos say, over and over."""

TEXT = """\
system
You are a helpful assistant.
user
Which digit is this?
assistant
user
Which digit is this?
assistant
user
What colour is it?
assistant
red
user
What colour is it?
assistant
green
user
What colour is it?
assistant
blue
user
What colour is it?
assistant
yellow
user
Which shape is it?
assistant
circle
user
Which shape is it?
assistant
square
user
Which shape is it?
assistant
triangle
user
How many shapes are there?
assistant
system
You are a helpful assistant.
user
How many red circles are there in this picture?
assistant
There are two red circles.
user
What is in the image?
assistant
The image shows a green square and a blue triangle.
user
Is there a yellow square?
assistant
No, there is not. The square is green.
user
What is the sum of the numbers? Think, then answer.
assistant
The answer is the sum of these numbers.
user
Describe the picture.
assistant
A cat is on the table, and the dog is under it.
user
Are you sure?
assistant
Yes.
"""
